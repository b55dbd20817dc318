"""TensorIterator: dtypes, shapes and strides of elementwise ops."""
