from __future__ import annotations

from pathlib import Path

from edgespec.cli.export.export_report import quantisation_by_class
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import TensorInfo


def tensor(name: str, type_name: str, byte_count: int = 1, shape: tuple[int, ...] = (32, 32)) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, type_name=type_name, offset=0, byte_count=byte_count)


def test_each_part_lists_its_types_by_falling_bytes() -> None:
    found = quantisation_by_class(
        [
            tensor("blk.0.ffn_norm.weight", "F32", shape=(32,)),
            tensor("blk.0.ffn_down.weight", "Q6_K", 3),
            tensor("blk.0.ffn_up.weight", "Q4_K", 2),
            tensor("blk.1.ffn_up.weight", "Q4_K", 2),
            tensor("blk.0.attn_output.weight", "Q4_K"),
            tensor("output.weight", "Q8_0"),
            tensor("token_embd.weight", "Q5_0"),
            tensor("blk.0.ssm_in.weight", "BF16"),
        ]
    )
    assert list(found.items()) == [
        ("embedding", "Q5_0"),
        ("head", "Q8_0"),
        ("attention", "Q4_K"),
        ("feed-forward", "Q4_K, Q6_K"),
        ("other", "BF16"),
        ("vectors", "F32"),
    ]
    assert quantisation_by_class([]) == {}


def test_quantisation_classes_of_a_real_gguf_header(models: Path) -> None:
    tied = quantisation_by_class(read_header(models / "tied.gguf").tensors)
    assert tied == {"embedding": "Q8_0", "attention": "Q8_0", "feed-forward": "Q8_0", "vectors": "F32"}
    assert quantisation_by_class(read_header(models / "untied.gguf").tensors)["head"] == "Q8_0"
