"""TensorIterator: the dtype, shape and strides of an elementwise op's result."""
