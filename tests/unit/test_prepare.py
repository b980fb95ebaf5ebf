"""prepare, with tokenizers made here: no model and no network."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from draftmill import prepare as stage
from draftmill.errors import DataError, DiskError, RecipeError, TargetError
from draftmill.prepare import answers
from draftmill.prepare.conversations import Conversation, Dropped, Turn, normalise
from draftmill.prepare.masks import Encoder, TemplateError
from draftmill.recipe import Recipe

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3 does: the thoughts of earlier turns are left out.
FORGETFUL = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])")
SPECIAL = ["<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def fast(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    wrapped.chat_template = template
    return wrapped


class Slow(PreTrainedTokenizer):
    """A tokenizer of characters that knows no offsets."""

    def __init__(self, template: str) -> None:
        # Ids past the last character's, so that no character is taken for a marker.
        markers = {sys.maxunicode + 1 + n: AddedToken(token, special=True) for n, token in enumerate(SPECIAL)}
        super().__init__(added_tokens_decoder=markers, eos_token="<|im_end|>", bos_token="<|im_start|>")
        self.chat_template = template

    @property
    def vocab_size(self) -> int:
        return sys.maxunicode + 1

    def get_vocab(self) -> dict[str, int]:
        return {**self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def talk(*contents: str, system: str = "") -> Conversation:
    roles = ("user", "assistant")
    turns = [Turn(role=roles[n % 2], content=content) for n, content in enumerate(contents)]  # type: ignore[arg-type]
    first = [Turn(role="system", content=system)] if system else []
    return Conversation(turns=(*first, *turns), place="test")


def supervised(encoder: Encoder, conversation: Conversation) -> list[str]:
    """The runs of supervised tokens, as text."""
    ids, mask = encoder.encode(conversation)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for n, (token, is_on) in enumerate(zip(ids, mask, strict=True)):
        if is_on and (n == 0 or not mask[n - 1]):
            runs.append([])
        if is_on:
            runs[-1].append(token)
    return [encoder.tokenizer.decode(run) for run in runs]


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize(
    ("make", "method"),
    [(lambda: fast(MARKED), "template"), (lambda: fast(CHATML), "offsets"), (lambda: Slow(CHATML), "ids")],
    ids=["template", "offsets", "ids"],
)
@settings(max_examples=30, deadline=None)
@given(contents=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), system=TEXT)
def test_just_what_the_assistant_said_is_supervised(
    make: Any, method: str, contents: list[tuple[str, str]], system: str
) -> None:
    encoder = Encoder.of(make())
    assert encoder.method == method
    conversation = talk(*(text for pair in contents for text in pair), system=system)
    assert supervised(encoder, conversation) == [answer + "<|im_end|>" for _, answer in contents]


def test_a_template_that_rewrites_earlier_turns_is_refused_rather_than_unmasked() -> None:
    encoder = Encoder.of(fast(FORGETFUL))
    assert supervised(encoder, talk("q", "<think>a</think>b")) == ["<think>a</think>b<|im_end|>"]
    with pytest.raises(TemplateError, match="otherwise than alone"):
        encoder.encode(talk("q", "<think>a</think>b", "q", "c"))


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[9].content }}", "{{ 1 + messages }}"])
def test_a_failing_template_is_an_error_of_its_own(template: str) -> None:
    with pytest.raises(TemplateError, match="the template fails"):
        Encoder.of(fast(template)).encode(talk("q", "a"))


def turn(role: str, content: object) -> dict[str, object]:
    return {"from": role, "value": content}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "no turns"),
        ({"conversations": []}, "no turns"),
        ("text", "no turns"),
        ({"conversations": [turn("human", "q")]}, "no assistant turn"),
        ({"conversations": [turn("gpt", "a"), turn("human", "q")]}, "begins with the assistant"),
        ({"conversations": [turn("human", "q"), turn("gpt", "")]}, "an empty turn"),
        ({"conversations": [turn("human", " \n"), turn("gpt", "a")]}, "an empty turn"),
        ({"conversations": [turn("human", "q"), turn("tool", "t"), turn("gpt", "a")]}, "unknown role: tool"),
        ({"conversations": [turn("human", "q"), turn("human", "q"), turn("gpt", "a")]}, "roles do not alternate"),
        ({"conversations": [turn("human", "q"), turn("gpt", None)]}, "a turn that is no text"),
        (
            {"conversations": [turn("human", "q"), turn("gpt", "\ud83d")]},
            "half a character (a lone surrogate) in a turn",
        ),
        ({"conversations": [turn("human", "q"), "a"]}, "a turn that is no object"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no turns"),
    ],
)
def test_what_cannot_be_used_is_dropped_with_its_reason(value: object, reason: str) -> None:
    assert normalise(value, "p") == Dropped(reason=reason, place="p")


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_the_assistants_names(role: str) -> None:
    found = normalise({"conversations": [turn("human", "q"), turn(role, "a"), turn("user", "last")]}, "p")
    assert isinstance(found, Conversation)
    assert found.messages() == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_a_question_alone_is_enough_where_the_target_answers() -> None:
    found = normalise({"messages": [{"role": "user", "content": "q"}]}, "p", answered=False)
    assert isinstance(found, Conversation)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a target that has a tokenizer, a configuration and the name of weights."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "target"
    fast().save_pretrained(target)
    config = {"num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 258, "max_position_embeddings": 512}
    (target / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (target / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def recipe(format_: str = "messages", path: str = "in.jsonl", **data: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r"},
            "target": {"path": "target"},
            "data": {"sources": [{"format": format_, "path": path}], "max_length": 200, "held_out": 0.25, **data},
            "evaluate": {"prompts": [{"name": "p", "format": "messages", "path": "p"}]},
        }
    )


def messages(*contents: str) -> str:
    return json.dumps({"messages": talk(*contents).messages()}) + "\n"


def summary() -> dict[str, Any]:
    found = json.loads(Path("runs/r/prepared/prepared.json").read_text())
    assert isinstance(found, dict)
    return found


def lines(side: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/r/prepared/{side}.jsonl").read_text().splitlines()]


def test_the_whole_stage(folder: Path) -> None:
    text = "".join(messages(f"question {n}", f"answer {n}") for n in range(40))
    Path("in.jsonl").write_text(
        text + messages("question 1", "answer 1") + messages("q", "a" * 300) + messages("alone")
    )
    stage.prepare(recipe())
    found = summary()
    assert found["read"] == 43
    assert found["kept"] == 40 == sum(found["samples"].values())
    assert found["dropped"] == {"a duplicate": 1, "longer than max_length": 1, "no assistant turn": 1}
    assert found["places"]["a duplicate"] == ["in.jsonl:41"]
    assert 0 < found["samples"]["held_out"] < 20
    assert not {line["id"] for line in lines("train")} & {line["id"] for line in lines("held_out")}
    assert sum(sum(line["loss_mask"]) for line in lines("train")) == found["supervised_tokens"]["train"]


def test_what_it_wrote_is_an_input_too(folder: Path) -> None:
    Path("in.jsonl").write_text("".join(messages(f"q {n}", f"a {n}") for n in range(8)))
    stage.prepare(recipe())
    before = {line["id"]: line for side in ("train", "held_out") for line in lines(side)}
    Path("out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in before.values()))
    stage.prepare(recipe("tokens", "out.jsonl"))
    after = {line["id"]: line for side in ("train", "held_out") for line in lines(side)}
    assert after == before


def test_more_data_moves_no_sample_to_the_other_side(folder: Path) -> None:
    Path("in.jsonl").write_text("".join(messages(f"q {n}", "a") for n in range(30)))
    stage.prepare(recipe())
    before = {line["id"] for line in lines("held_out")}
    Path("in.jsonl").write_text("".join(messages(f"q {n}", "a") for n in range(60)))
    stage.prepare(recipe())
    assert before <= {line["id"] for line in lines("held_out")}


def test_twice_the_same_is_done_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text(messages("q", "a"))
    stage.prepare(recipe())
    stage.prepare(recipe())
    assert "prepared already" in capsys.readouterr().out
    Path("runs/r/prepared/train.jsonl").write_text("damaged")
    stage.prepare(recipe())
    assert len(lines("train")) == 1


def test_truncation_keeps_what_has_something_to_learn(folder: Path) -> None:
    Path("in.jsonl").write_text(messages("q", "a" * 300) + messages("q" * 300, "a"))
    stage.prepare(recipe(overlong="truncate"))
    [line] = lines("train")
    assert len(line["input_ids"]) == 200
    assert summary()["dropped"] == {"nothing to learn from: the mask is empty": 1}


def test_a_limit_counts_what_is_of_use(folder: Path) -> None:
    Path("in.jsonl").write_text(
        messages("q 0", "a" * 300) + messages("q 1", "a") + messages("q 1", "a") + messages("q 2", "a") + "broken"
    )
    stage.prepare(recipe(sources=[{"format": "messages", "path": "in.jsonl", "limit": 2}]))
    assert summary()["kept"] == 2


def test_a_source_may_be_asked_for_what_its_users_ask(folder: Path) -> None:
    text = messages("write code", "a") + messages("hello", "code") + messages("hi", "a", "now Code it", "b")
    Path("in.jsonl").write_text(text)
    source = {"format": "messages", "path": "in.jsonl", "match": "(?i)code"}
    stage.prepare(recipe(sources=[source]))
    assert summary()["dropped"] == {"not matching": 1}
    with pytest.raises(ValueError, match="is no regular expression"):
        recipe(sources=[{**source, "match": "(code"}])


def test_the_targets_own_limit_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text(messages("q", "a" * 600) + messages("q", "a" * 300))
    stage.prepare(recipe(max_length=4096))
    assert summary()["dropped"] == {"longer than max_length": 1}
    assert "the target takes 512 tokens" in capsys.readouterr().out


def test_a_marker_that_the_target_has_no_row_for(folder: Path) -> None:
    path = folder / "target" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 201}))
    Path("in.jsonl").write_text(messages("q", "a") + messages("q", "a b"))  # a space is 222
    stage.prepare(recipe())
    assert summary()["dropped"] == {"token ids outside the target's vocabulary": 1}


@pytest.mark.parametrize("content", ["damaged", "[]", "{}", '{"files": {}}', '{"files": 3, "inputs": 1}', "\x00"])
def test_a_damaged_summary_is_made_anew(folder: Path, content: str) -> None:
    Path("in.jsonl").write_text(messages("q", "a"))
    stage.prepare(recipe())
    before = summary()
    Path("runs/r/prepared/prepared.json").write_text(content)
    stage.prepare(recipe())
    assert {**summary(), "seconds": 0} == {**before, "seconds": 0}


def test_a_full_disk(small_disk: Path, folder: Path) -> None:
    Path("in.jsonl").write_text("".join(messages(f"q {n}", "a" * 150) for n in range(4000)))
    wide = recipe()
    with pytest.raises(DiskError, match="the disk is full"):
        stage.prepare(wide.model_copy(update={"run": wide.run.model_copy(update={"folder": str(small_disk)})}))
    assert not (small_disk / "r" / "prepared" / "prepared.json").exists()


def test_a_gguf_file_that_is_not_there(folder: Path) -> None:
    Path("in.jsonl").write_text(messages("q", "a"))
    wanted = recipe()
    with pytest.raises(TargetError, match=r"cannot read nowhere\.gguf"):
        stage.prepare(wanted.model_copy(update={"target": wanted.target.model_copy(update={"path": "nowhere.gguf"})}))


def test_a_limit_stops_reading(folder: Path) -> None:
    Path("in.jsonl").write_text(messages("q 1", "a") + messages("q 2", "a") + "broken")
    stage.prepare(recipe(sources=[{"format": "messages", "path": "in.jsonl", "limit": 2}]))
    assert summary()["read"] == 2


SHAREGPT = json.dumps(
    [{"id": str(n), "conversations": [turn("human", f"q{n}"), turn("gpt", f"a{n}")]} for n in range(5)]
)
GOOD_TOKENS = json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]}) + "\n"


@pytest.mark.parametrize(
    ("format_", "content", "words"),
    [
        ("sharegpt", SHAREGPT[:-40].encode(), "near byte .* 4 whole conversations come before it"),
        ("sharegpt", b"{not json", "near byte"),
        ("sharegpt", b'[{"a": "\xff"}]', "near byte"),
        ("messages", messages("q", "a").encode() + b"{\n", r"in\.jsonl, line 2"),
        ("messages", b"\xff\xfe\n", r"in\.jsonl, line 1: .*utf-8"),
        ("messages", b'{"messages": ' + b"[" * 100_000 + b"\n", r"in\.jsonl, line 1: .*recursion"),
        ("tokens", b'{"input_ids": ' + b"[" * 100_000 + b"\n", r"in\.jsonl, line 1: .*recursion"),
        (
            "tokens",
            GOOD_TOKENS.encode() + b'{"input_ids": [1, 2], "loss_mask": [1]}\n',
            "in.jsonl:2: 2 input_ids and 1",
        ),
        (
            "tokens",
            b'{"input_ids": [258], "loss_mask": [1]}\n',
            "token id 258 is outside the target's vocabulary of 258",
        ),
        ("messages", messages("alone").encode(), "none of 1 conversations can be used .no assistant turn: 1"),
        ("messages", b"", "none of 0 conversations"),
    ],
)
def test_a_damaged_source_stops_with_its_place(folder: Path, format_: str, content: bytes, words: str) -> None:
    Path("in.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        stage.prepare(recipe(format_))
    assert not Path("runs/r/prepared/prepared.json").exists()
    assert Path("in.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("format_", "content", "kept", "reason"),
    [
        ("sharegpt", SHAREGPT[:-40].encode(), 4, "the file ends early or is broken from here on"),
        ("messages", messages("q", "a").encode() + b"{\n" + messages("r", "a").encode(), 2, "a broken line"),
        ("tokens", GOOD_TOKENS.encode() + b'{"input_ids": [1, 2], "loss_mask": [1]}\n', 1, "a broken line"),
    ],
)
def test_what_is_whole_is_kept_only_when_asked(
    folder: Path, format_: str, content: bytes, kept: int, reason: str
) -> None:
    Path("in.jsonl").write_bytes(content)
    stage.prepare(recipe(format_), keep_going=True)
    assert summary()["kept"] == kept
    assert summary()["dropped"] == {reason: 1}


def test_a_missing_source(folder: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read in\.jsonl"):
        stage.prepare(recipe())


@pytest.mark.parametrize(
    ("remove", "words"),
    [("model.safetensors", "holds no weights"), ("config.json", "cannot read"), ("tokenizer.json", "tokenizer")],
)
def test_an_incomplete_target(folder: Path, remove: str, words: str) -> None:
    Path("in.jsonl").write_text(messages("q", "a"))
    (folder / "target" / remove).unlink()
    with pytest.raises(TargetError, match=words):
        stage.prepare(recipe())


def test_a_tokenizer_without_a_template(folder: Path) -> None:
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / "target" / file).unlink(missing_ok=True)
    fast(None).save_pretrained(folder / "target")
    Path("in.jsonl").write_text(messages("q", "a"))
    with pytest.raises(TargetError, match="has no chat template"):
        stage.prepare(recipe())
    Path("in.jsonl").write_text(GOOD_TOKENS)
    stage.prepare(recipe("tokens"))
    assert summary()["kept"] == 1


def test_a_package_that_is_not_there(folder: Path) -> None:
    with pytest.raises(RecipeError, match="no such file in an installed package"):
        stage.prepare(recipe(path="package:no_such_package/x.json"))


class Output:
    def __init__(self, ids: list[int]) -> None:
        self.outputs = [self]
        self.token_ids = ids


class Engine:
    """Answers each prompt with its number of tokens, spelled, and counts what it was asked."""

    def __init__(self, tokenizer: Any, stop_after: int = 10**9) -> None:
        self.tokenizer = tokenizer
        self.asked: list[list[int]] = []
        self.left = stop_after

    def generate(self, inputs: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> list[Output]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.asked += [item["prompt_token_ids"] for item in inputs]
        return [
            Output(self.tokenizer(f"{len(item['prompt_token_ids'])}<|im_end|>")["input_ids"][: p.max_tokens])
            for item, p in zip(inputs, params, strict=True)
        ]


def regenerating(**options: Any) -> Recipe:
    return recipe(regenerate={"enabled": True, "max_new_tokens": 8, "batch": 2, **options})


def engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    made = Engine(fast(), **options)
    monkeypatch.setattr(answers, "_start", lambda *_: made)
    return made


def test_answers_are_the_targets_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch)
    Path("in.jsonl").write_text(messages("one", "old answer", "two", "old answer"))
    stage.prepare(regenerating(turns=2))
    [line] = lines("train")
    text = fast().decode(line["input_ids"])
    first = len("xone") + 1 + len("user\n") + 2 + len("assistant\n")
    assert text.startswith(
        f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{first}<|im_end|>\n<|im_start|>user\ntwo"
    )
    said = [t for t, m in zip(line["input_ids"], line["loss_mask"], strict=True) if m]
    assert fast().decode(said).count("<|im_end|>") == 2
    assert "old" not in text


def test_an_answer_that_was_cut_has_no_end_marker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch)
    Path("in.jsonl").write_text(messages("one", "a"))
    stage.prepare(regenerating(max_new_tokens=1))
    [line] = lines("train")
    assert sum(line["loss_mask"]) == 1
    assert line["input_ids"][-1] != fast().eos_token_id


def test_a_stopped_regeneration_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("in.jsonl").write_text("".join(messages(f"q{n}", "a") for n in range(7)))
    unbroken = engine(monkeypatch)
    stage.prepare(regenerating())
    expected = lines("train"), lines("held_out")
    for path in Path("runs/r/prepared").iterdir():
        path.unlink()
    broken = engine(monkeypatch, stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        stage.prepare(regenerating())
    with Path("runs/r/prepared/regenerated.jsonl").open("a") as file:
        file.write('{"id": "half')
    resumed = engine(monkeypatch)
    stage.prepare(regenerating())
    assert (lines("train"), lines("held_out")) == expected
    assert broken.asked + resumed.asked == unbroken.asked


def test_other_settings_answer_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("in.jsonl").write_text(messages("q", "a"))
    engine(monkeypatch)
    stage.prepare(regenerating())
    again = engine(monkeypatch)
    stage.prepare(regenerating(max_new_tokens=3))
    assert len(again.asked) == 1


def test_a_prompt_without_room_for_its_answer_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch)
    Path("in.jsonl").write_text(messages("q" * 190, "a") + messages("q", "a"))
    stage.prepare(regenerating())
    assert summary()["dropped"] == {"no room for an answer within max_length": 1}
