"""Trains with the callback of docs/monitor.md. Ends with an error if a check fails."""

import torch
from monitor_recipe import check
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def train(*callbacks):
    set_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 100, (256, 16))]
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    settings = TrainingArguments(
        output_dir="checkpoints",
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=1000,
        report_to="none",
    )
    Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data[:8], callbacks=[*callbacks]).train()
    return model.state_dict()


check("transformers", train, {"model.layers.0.mlp/amax", "model.layers.0.mlp.up_proj.weight/update", "lm_head/casts"})
