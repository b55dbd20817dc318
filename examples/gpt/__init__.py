"""The parts of examples/train_gpt.py and examples/tune_gpt.py: text, model, loss, training in lockstep, reports."""
