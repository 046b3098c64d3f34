from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.huggingface.pretokenizers import byte_level_name, sentencepiece_prefix
from edgespec.export.huggingface.tokenizer import Vocabulary, read_vocabulary
from tests.support.hf_folder import METASPACE_NORMALIZER, byte_level, write_byte_level_tokenizer

ROWS = 265  # 3 markers, 256 bytes, 6 merged pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
Change = Callable[[dict[str, Any]], object]


def changed(folder: Path, change: Change | None = None, rows: int = ROWS, **config: Any) -> Vocabulary:
    """The byte-level tokenizer of the tests after ``change`` to its tokenizer.json."""
    write_byte_level_tokenizer(folder, **config)
    if change is not None:
        path = folder / "tokenizer.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
    return read_vocabulary(folder, rows)


def write(folder: Path, name: str, document: Any) -> None:
    (folder / name).write_text(json.dumps(document))


# ---------------------------------------------------------------------------------------------- over bytes


def test_tokens_types_and_merges_keep_their_order(tmp_path: Path) -> None:
    found = changed(tmp_path)
    assert (found.model, found.pre, found.add_space_prefix, found.scores) == ("gpt2", "gpt-2", False, None)
    assert found.tokens[:4] == ("<|endoftext|>", "<|begin|>", "<|im_end|>", "!")
    assert found.tokens[-6:] == ("th", "the", "Ġthe", "in", "er", "Ġa")
    assert found.types == (CONTROL,) * 3 + (NORMAL,) * 262
    assert found.merges == ("t h", "th e", "Ġ the", "i n", "e r", "Ġ a")


def test_a_converted_tokenizer_gives_the_gguf_keys(tmp_path: Path) -> None:
    found = changed(tmp_path, chat_template="{{ messages }}")
    values = found.metadata()
    assert list(values) == [
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.chat_template",
    ]
    assert values["tokenizer.ggml.bos_token_id"] == 1
    assert values["tokenizer.ggml.add_bos_token"] is False
    assert values["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "dbrx", "gpt-4o", "tekken", "seed-coder", "qwen2"])
def test_the_pre_tokenizer_is_recognised_by_its_structure(tmp_path: Path, pre: str) -> None:
    assert changed(tmp_path, pre=pre).pre == pre


def test_merges_are_read_as_pairs_and_as_strings(tmp_path: Path) -> None:
    def pairs(document: dict[str, Any]) -> None:
        document["model"]["merges"] = [merge.split(" ") for merge in document["model"]["merges"]]

    assert changed(tmp_path, pairs) == changed(tmp_path)


def test_rows_without_token_are_unused_and_tokens_without_row_dropped(tmp_path: Path) -> None:
    def added(document: dict[str, Any]) -> None:
        document["added_tokens"].append({"id": ROWS + 1, "content": "<image>", "special": True})

    found = changed(tmp_path, added, rows=ROWS + 3)
    assert found.tokens[ROWS:] == (f"[PAD{ROWS}]", "<image>", f"[PAD{ROWS + 2}]")
    assert found.types[ROWS:] == (UNUSED, CONTROL, UNUSED)
    assert len(changed(tmp_path, added, rows=ROWS).tokens) == ROWS
    with pytest.raises(ModelFileError, match=f"has no row in the model's embedding of {ROWS - 1} rows"):
        changed(tmp_path, rows=ROWS - 1)


@pytest.mark.parametrize(
    ("text", "special", "kind"),
    [
        ("<tool_call>", False, USER_DEFINED),
        ("<tool_call>", True, CONTROL),
        ("<|fim_prefix|>", False, CONTROL),  # Qwen does not declare its markers special
        ("<unused12>", False, CONTROL),
        ("<pad>", False, CONTROL),
        ("▁▁", False, USER_DEFINED),
    ],
)
def test_added_tokens_get_their_gguf_type(tmp_path: Path, text: str, special: bool, kind: int) -> None:
    token = {"id": ROWS, "content": text, "special": special}
    found = changed(tmp_path, lambda document: document["added_tokens"].append(token), rows=ROWS + 1)
    assert (found.tokens[ROWS], found.types[ROWS]) == (text, kind)


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    known = byte_level("qwen2")
    normalizer, pre_tokenizer = known["normalizer"], known["pre_tokenizer"]
    split, plain = pre_tokenizer["pretokenizers"]
    assert byte_level_name(normalizer, pre_tokenizer, ignore_merges=False) == "qwen2"
    assert byte_level_name(None, pre_tokenizer, ignore_merges=False) == "qwen2"
    wrong: Any
    for wrong in (
        None,
        7,
        [],
        {},
        {"type": []},
        plain | {"add_prefix_space": True},
        {"type": "Whitespace"},
        {"type": "Sequence"},
        {"type": "Sequence", "pretokenizers": []},
        {"type": "Sequence", "pretokenizers": [split]},
        {"type": "Sequence", "pretokenizers": [plain, split]},
        {"type": "Sequence", "pretokenizers": [split, plain, plain]},
        {"type": "Sequence", "pretokenizers": [split, plain | {"use_regex": True}]},
        {"type": "Sequence", "pretokenizers": [split | {"behavior": "Removed"}, plain]},
        {"type": "Sequence", "pretokenizers": [split | {"invert": True}, plain]},
        {"type": "Sequence", "pretokenizers": [split | {"pattern": {"Regex": r"\p{N}"}}, plain]},
        {"type": "Sequence", "pretokenizers": [split | {"pattern": {"String": " "}}, plain]},
        {"type": "Sequence", "pretokenizers": [split | {"pattern": 1}, plain]},
        {"type": "Sequence", "pretokenizers": [pre_tokenizer]},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, plain]},
    ):
        assert byte_level_name(None, wrong, ignore_merges=False) is None, wrong
    assert byte_level_name(normalizer, pre_tokenizer, ignore_merges=True) is None
    assert byte_level_name({"type": "NFKC"}, pre_tokenizer, ignore_merges=False) is None
    assert byte_level_name({"type": "NFC"}, byte_level("smollm")["pre_tokenizer"], ignore_merges=False) is None
    assert byte_level_name(None, byte_level("gpt-4o")["pre_tokenizer"], ignore_merges=True) is None


# ------------------------------------------------------------------------------------------ SentencePiece

PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "▁ab", "abc")
MERGES = ["a b", "▁ ab", "ab c"]


def sentencepiece(folder: Path, merges: list[str] | None = None, **changes: Any) -> Vocabulary:
    special = [{"id": token, "content": PIECES[token], "special": True} for token in range(3)]
    document = {
        "added_tokens": special + changes.pop("added", []),
        "normalizer": changes.pop("normalizer", METASPACE_NORMALIZER),
        "pre_tokenizer": changes.pop("pre_tokenizer", None),
        "post_processor": changes.pop("post_processor", None),
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {text: token for token, text in enumerate(changes.pop("pieces", PIECES))},
            "merges": MERGES if merges is None else merges,
        },
    }
    write(folder, "tokenizer.json", document)
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | changes)
    return read_vocabulary(folder, 267)


def test_sentencepiece_merges_become_scores(tmp_path: Path) -> None:
    found = sentencepiece(tmp_path)
    assert (found.model, found.pre, found.merges, found.add_space_prefix) == ("llama", "default", None, True)
    assert found.tokens == (*PIECES, "[PAD266]")
    assert found.types == (UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 7, UNUSED)
    assert found.special.ids == {"bos": 1, "eos": 2, "unknown": 0}
    assert found.scores is not None
    scores = dict(zip(found.tokens, found.scores, strict=True))
    assert scores["ab"] > scores["▁ab"] > scores["abc"] > scores["a"]
    assert "tokenizer.ggml.scores" in found.metadata()
    assert "tokenizer.ggml.merges" not in found.metadata()


def test_sentencepiece_merges_of_a_piece_must_be_adjacent(tmp_path: Path) -> None:
    pieces = (*PIECES, "bc")
    together = ["a b", "b c", "ab c", "a bc", "▁ ab"]
    assert sentencepiece(tmp_path, together, pieces=pieces).scores is not None
    apart = ["a b", "b c", "ab c", "▁ ab", "a bc"]
    with pytest.raises(InvalidRequestError, match="the merges that make 'abc' are not adjacent"):
        sentencepiece(tmp_path, apart, pieces=pieces)
    # llama.cpp never merges a user-defined token, so its merges do not matter.
    added = [{"id": 265, "content": "abc", "special": False}]
    assert sentencepiece(tmp_path, apart, pieces=pieces, added=added).scores is not None


def test_user_defined_tokens_have_plain_spaces(tmp_path: Path) -> None:
    added = [{"id": 266, "content": "▁▁x", "special": False}]
    found = sentencepiece(tmp_path, added=added)
    assert (found.tokens[266], found.types[266]) == ("  x", USER_DEFINED)


def test_byte_fallback_without_all_byte_tokens_is_refused(tmp_path: Path) -> None:
    pieces = tuple("other" if piece == "<0x41>" else piece for piece in PIECES)
    with pytest.raises(ModelFileError, match="falls back to bytes but lacks the tokens of some"):
        sentencepiece(tmp_path, pieces=pieces)


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
GEMMA_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (METASPACE_NORMALIZER, None, True),  # Llama 2, Mistral 7B v0.1
        (REPLACE, GEMMA_SPLIT, False),
        (REPLACE, None, False),
        ({"type": "Sequence", "normalizers": [REPLACE]}, None, False),
        (None, METASPACE | {"prepend_scheme": "first"}, True),  # Mistral 7B v0.3
        (None, METASPACE | {"prepend_scheme": "always"}, True),
        (None, METASPACE | {"prepend_scheme": "never"}, False),
        (None, METASPACE | {"prepend_scheme": "other"}, None),
        (None, METASPACE | {"prepend_scheme": "first", "split": True}, None),
        (None, METASPACE | {"prepend_scheme": "first", "replacement": "_"}, None),
        (REPLACE, METASPACE | {"prepend_scheme": "first"}, None),
        ({"type": "NFKC"}, None, None),
        (None, None, None),
        (None, {"type": "Whitespace"}, None),
        (None, [], None),
    ],
)
def test_the_space_before_text_is_read_from_normalizer_or_pre_tokenizer(
    normalizer: Any, pre_tokenizer: Any, prefix: bool | None
) -> None:
    assert sentencepiece_prefix(normalizer, pre_tokenizer) is prefix


def test_an_unknown_sentencepiece_normalizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="differ from SentencePiece's"):
        sentencepiece(tmp_path, normalizer={"type": "NFKC"})


# ------------------------------------------------------------------------------------------ special tokens


def test_a_special_tokens_text_takes_precedence_over_its_id(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"eos_token_id": 2, "bos_token_id": 2, "pad_token_id": 2})
    assert changed(tmp_path).special.ids == {"bos": 1, "eos": 0, "eot": 2, "padding": 2}
    assert changed(tmp_path, eos_token={"content": "<|im_end|>"}).special.ids["eos"] == 2
    assert changed(tmp_path, eos_token="no such token").special.ids["eos"] == 2


def test_special_tokens_map_is_used_if_tokenizer_config_is_silent(tmp_path: Path) -> None:
    write(tmp_path, "special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": {"content": "<|begin|>"}})
    ids = changed(tmp_path, eos_token=None).special.ids
    assert (ids["eos"], ids["padding"]) == (2, 1)


def test_special_token_ids_are_read_from_the_text_config(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": [-1, 2, 10**6]}})
    assert changed(tmp_path, eos_token=None, bos_token=None).special.ids == {"eos": 2}


@pytest.mark.parametrize(
    ("stops", "eos", "eot", "eom"),
    [
        ([0], "<|endoftext|>", None, None),
        ([0, 2], "<|endoftext|>", 2, None),
        ([1, 2], "<|endoftext|>", 2, 1),
        ([0, 1], "<|endoftext|>", 1, None),
        ([2, 0, 1], "<|im_end|>", None, 1),  # the end of a turn is also eos, and readers know the end of a text
    ],
)
def test_the_turn_end_and_one_more_are_chosen_from_the_stop_tokens(
    tmp_path: Path, stops: list[int], eos: str, eot: int | None, eom: int | None
) -> None:
    write(tmp_path, "generation_config.json", {"eos_token_id": stops})
    found = changed(tmp_path, eos_token=eos).special.ids
    assert (found.get("eot"), found.get("eom")) == (eot, eom)


def test_the_models_name_says_that_special_tokens_take_blanks_behind_them(tmp_path: Path) -> None:
    def strips(*numbers: int) -> Change:
        def change(document: dict[str, Any]) -> None:
            for number in numbers:
                document["added_tokens"][number]["rstrip"] = True

        return change

    assert changed(tmp_path).named("my model") == "my model"
    assert changed(tmp_path, strips(1, 2)).named("my model") == "Phi-3 my model", "as for Phi-3: not <|endoftext|>"
    assert changed(tmp_path, strips(1, 2)).named("My-Phi3-model") == "My-Phi3-model"
    assert changed(tmp_path, strips(1)).named("my model") == "my model", "a file cannot say it of some"


@pytest.mark.parametrize(
    ("single", "config", "bos", "eos"),
    [
        (None, {}, False, False),
        (["<|begin|>", None], {}, True, False),
        ([None, "<|endoftext|>"], {}, False, True),
        (["<|im_end|>", None, "<|begin|>"], {}, False, False),
        (["<|begin|>", None], {"add_bos_token": False}, False, False),
        (None, {"add_bos_token": True, "add_eos_token": True}, True, True),
        (None, {"add_bos_token": True, "bos_token": None}, False, False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_post_processor_decides_whether_bos_and_eos_are_added(
    tmp_path: Path, single: list[str | None] | None, config: dict[str, Any], bos: bool, eos: bool, nested: bool
) -> None:
    def change(document: dict[str, Any]) -> None:
        parts = [
            {"Sequence": {"id": "A"}} if name is None else {"SpecialToken": {"id": name}} for name in single or []
        ]
        template = {"type": "TemplateProcessing", "single": parts}
        sequence = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
        document["post_processor"] = None if single is None else sequence if nested else template

    special = changed(tmp_path, change, **config).special
    assert (special.add_bos, special.add_eos) == (bos, eos)


@pytest.mark.parametrize("value", [7, [], {"type": "Sequence"}, {"type": "TemplateProcessing", "single": [7, {}]}])
def test_an_unknown_post_processor_adds_no_tokens(tmp_path: Path, value: Any) -> None:
    special = changed(tmp_path, lambda document: document.update(post_processor=value)).special
    assert (special.add_bos, special.add_eos) == (False, False)


def test_a_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="names the token that ends an answer"):
        changed(tmp_path, eos_token=None)


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("generation_config.json", {"eos_token_id": "2"}),
        ("generation_config.json", {"eos_token_id": [[2]]}),
        ("special_tokens_map.json", {"eos_token": 7}),
        ("special_tokens_map.json", []),
        ("special_tokens_map.json", {"pad_token": {"content": 7}}),
    ],
)
def test_malformed_special_token_files_are_refused(tmp_path: Path, name: str, document: Any) -> None:
    write(tmp_path, name, document)
    with pytest.raises(ModelFileError) as caught:
        changed(tmp_path, eos_token=None)
    assert name in caught.value.message


def test_the_chat_template_file_takes_precedence(tmp_path: Path) -> None:
    assert changed(tmp_path).special.chat_template is None
    assert changed(tmp_path, chat_template="old").special.chat_template == "old"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert changed(tmp_path, chat_template=named).special.chat_template == "plain"
    assert changed(tmp_path, chat_template=named[:1]).special.chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}', encoding="utf-8")
    assert changed(tmp_path).special.chat_template == "of the processor"
    assert changed(tmp_path, chat_template="old").special.chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ 'neu' }}é", encoding="utf-8")
    assert changed(tmp_path, chat_template="old").special.chat_template == "{{ 'neu' }}é"


def test_named_chat_templates_become_keys(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "my-own", "template": "other"},
        {"name": "empty", "template": ""},
        {"template": "without a name"},
    ]
    values = changed(tmp_path, chat_template=named).metadata()
    assert {key: value for key, value in values.items() if "chat_template" in key} == {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ("tool_use", "my_own"),
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.my_own": "other",
    }
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("newer", encoding="utf-8")
    found = changed(tmp_path, chat_template=named).special.named_templates
    assert found == {"tool_use": "newer", "my_own": "other"}, "a file counts before the list"


def test_invalid_chat_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="chat_template must be a string, got 7"):
        changed(tmp_path, chat_template=7)
    with pytest.raises(ModelFileError, match="chat_template is too long"):
        changed(tmp_path, chat_template="x" * (1 << 20) + "x")
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ModelFileError, match=r"not valid UTF-8 \(at byte 2\)"):
        changed(tmp_path)


# ------------------------------------------------------------------------------------------------ malformed


def model(**changes: Any) -> Change:
    return lambda document: document["model"].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document: document.pop("model"), "model is missing"),
        (model(vocab=[]), "model.vocab must be"),
        (model(vocab={}), "model.vocab must be"),
        (model(vocab={"a": "0"}), "'0' is not a token id"),
        (model(vocab={"a": -1}), "-1 is not a token id"),
        (model(vocab={"a": True}), "True is not a token id"),
        (model(vocab={"a": 2**40}), "is not a token id"),
        (model(vocab={"a": 7, "b": 7}, merges=[]), "two tokens have the id 7"),
        (model(vocab={"": 7}), "token 7 has no text"),
        (model(vocab={"x" * 4097: 7}), "token 7 has no text of 1 to 4096 characters"),
        (model(vocab={"a\0": 7}), "token 7 has a text with a NUL"),
        (model(vocab={"\ud83d": 7}), "token 7 has a text with half of a surrogate pair"),
        (model(merges=None), "model.merges is missing"),
        (model(merges=[7]), "a merge is not two pieces"),
        (model(merges=["t"]), "a merge is not two pieces"),
        (model(merges=["t h e"]), "a merge is not two pieces"),
        (model(merges=[["t", 7]]), "a merge is not two pieces"),
        (model(merges=["q q"]), "does not join two tokens into a token"),
        (model(merges=["t nothing"]), "does not join two tokens into a token"),
        (lambda document: document.update(added_tokens={}), "added_tokens must be"),
        (lambda document: document.update(added_tokens=[7]), "added_tokens must be"),
        (lambda document: document["added_tokens"].append({"id": 5, "content": "x"}), "two tokens have the id 5"),
        (lambda document: document["added_tokens"].append({"id": "5", "content": "x"}), "'5' is not a token id"),
        (lambda document: document["added_tokens"].append({"id": 5}), "token 5 has no text"),
        (lambda document: document["added_tokens"].append({"id": ROWS, "content": "the"}), "the same token"),
    ],
)
def test_a_malformed_tokenizer_json_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        changed(tmp_path, change, rows=ROWS + 1)
    assert words in caught.value.message
    assert len(caught.value.message) < len(str(tmp_path)) + 300


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (model(type="Unigram"), "its model is 'Unigram', not BPE"),
        (model(continuing_subword_prefix="##"), "it has a continuing_subword_prefix"),
        (model(end_of_word_suffix="</w>"), "it has a end_of_word_suffix"),
        (model(ignore_merges=True), "are not known"),
        (lambda document: document.update(pre_tokenizer=None), "are not known"),
    ],
)
def test_a_tokenizer_that_llama_cpp_cannot_reproduce_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        changed(tmp_path, change)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_folder_with_only_tokenizer_model_gives_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        read_vocabulary(tmp_path, 1)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model alone is not read") as caught:
        read_vocabulary(tmp_path, 1)
    assert "save_pretrained" in (caught.value.hint or "")
