"""Greedy completions by transformers in float32: what the service must answer for the same weights and prompts.

Runs under the release's Python on the host that holds the weights, for models small enough for a CPU. Arguments: the
model's folder and a JSON list of cases with ``prompt`` and ``max_tokens``. The last line of the output is that list
with ``expect`` (the text after the prompt), ``tokens`` (its ids) and ``margin``: the smallest lead, in logits, of a
chosen token over the runner-up. A margin near zero means that two correct implementations may differ there.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def complete(model, tokenizer, prompt, max_tokens):
    """Return (text, token ids, smallest margin) of the greedy completion, by full forward passes without a KV cache."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    start, margin = ids.shape[1], float("inf")
    for _ in range(max_tokens):
        logits = model(ids, use_cache=False).logits[0, -1]
        best = torch.topk(logits, 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        token = int(best.indices[0])
        if token == model.config.eos_token_id:
            break
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    new = ids[0, start:].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new, margin


def main():
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for case in cases:
            text, tokens, margin = complete(model, tokenizer, case["prompt"], int(case["max_tokens"]))
            answers.append({**case, "expect": text, "tokens": tokens, "margin": round(margin, 6)})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
