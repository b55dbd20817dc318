"""The parts of examples/train_gpt.py: the text, the model, the training in lockstep, and the report."""
