"""The parts of train_gpt.py, tune_gpt.py and float8_gpt.py: text, model, loss, training in lockstep, reports."""
