"""Trains a small causal language model with the Trainer, from a config."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--gradient_checkpointing", choices=["reentrant", "non_reentrant"])
parser.add_argument("--torch_compile", action="store_true")
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--evaluate", action="store_true")
args = parser.parse_args()


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, seed):
        self.tokens = torch.randint(0, 100, (512, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_trainer(steps):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    settings = TrainingArguments(
        output_dir="checkpoints",
        max_steps=steps,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=1e-3,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=args.gradient_checkpointing is not None,
        activation_checkpointing_kwargs={"use_reentrant": args.gradient_checkpointing == "reentrant"},
        torch_compile=args.torch_compile,
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=10,
        save_steps=10 if args.resume else 1000,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(config)
    return Trainer(model=model, args=settings, train_dataset=RandomTokens(1), eval_dataset=RandomTokens(2))


if args.resume:
    make_trainer(10).train()
trainer = make_trainer(20)
trainer.train(resume_from_checkpoint="checkpoints/checkpoint-10" if args.resume else None)
losses = [
    entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in entry
]
torch.save({"losses": losses, "weights": trainer.model.state_dict()}, "result.pt")
