"""`draftmill prepare` where the target answers anew, with the real engine."""

import json
from pathlib import Path

import torch

from draftmill import prepare
from draftmill.recipe import Recipe

QUESTIONS = ["What is the capital of France?", "Write a haiku.", "2 + 2?", "Name three colours.", "Say hello."]
NEW_TOKENS = 12


def test_answers_are_the_targets_own_greedy_ones(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "in.jsonl"
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "no"}]} for q in QUESTIONS]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "folder": str(tmp_path)},
            "target": {"path": str(smollm2), "dtype": "float32"},
            "data": {
                "sources": [{"format": "messages", "path": str(source)}],
                "max_length": 128,
                "held_out": 0.4,
                "regenerate": {"max_new_tokens": NEW_TOKENS, "batch": 3},
            },
            "evaluate": {"prompts": [{"name": "p", "format": "messages", "path": "unused"}]},
        }
    )
    prepare.prepare(recipe)
    lines = [
        json.loads(line)
        for side in ("train", "held_out")
        for line in (recipe.folder.prepared / f"{side}.jsonl").read_text().splitlines()
    ]
    assert len(lines) == len(QUESTIONS)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    expected = []
    for question in QUESTIONS:
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            text = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        expected.append((text.tolist(), [0] * prompt.shape[1] + [1] * (len(text) - prompt.shape[1])))
    assert sorted((line["input_ids"], line["loss_mask"]) for line in lines) == sorted(expected)
