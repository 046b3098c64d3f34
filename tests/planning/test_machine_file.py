"""What a machine description may contain, and the errors for anything else."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import ProfileError
from edgespec.files.checked import is_line
from edgespec.planning.simulated.machine_file import Link, SharedBandwidth, machine_from_table

TEXT = """
description = "two devices"
context = 4096
[[devices]]
name = "cpu"
kind = "cpu"
threads = 8
memory_bytes = 8_000_000_000
read_bytes_per_s = 50e9
operations_per_s = 1e12
launch_s = 0.001
verify_curve = [[1, 1.0], [4, 2.6]]
[[devices]]
name = "Vulkan0"
kind = "gpu"
runtime = "onnx"
shares_memory_with = "cpu"
read_bytes_per_s = 60e9
operations_per_s = 5e12
launch_s = 0
[[shared_bandwidth]]
devices = ["cpu", "Vulkan0"]
bytes_per_s = 70e9
[[links]]
between = ["cpu", "Vulkan0"]
hand_over_s = 0.0001
[target]
name = "large"
weights_bytes = 2_000_000_000
bytes_per_token = 1_900_000_000
kv_bytes_per_token = 65536
operations_per_token = 6e9
devices = ["cpu"]
layers = 24
[[drafters]]
name = "small"
weights_bytes = 500_000_000
bytes_per_token = 400_000_000
kv_bytes_per_token = 0
operations_per_token = 1000000000
acceptance = [0.8, 1, 0]
[[drafters]]
kind = "lookup"
acceptance = [0.2]
"""
TABLE: dict[str, Any] = tomllib.loads(TEXT)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    table = copy.deepcopy(TABLE)
    change(table)
    return table


def refusal(table: dict[str, Any]) -> ProfileError:
    with pytest.raises(ProfileError) as raised:
        machine_from_table(table, "m.toml")
    assert raised.value.message.startswith("m.toml: ")
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 250
    return raised.value


def test_a_machine_description_is_read_into_records() -> None:
    machine = machine_from_table(TABLE, "m.toml")
    assert (machine.description, machine.context_length) == ("two devices", 4096)
    cpu, integrated = machine.devices
    assert (cpu.runtime, cpu.threads, cpu.memory, cpu.verify_curve) == ("llama", 8, "cpu", ((1, 1.0), (4, 2.6)))
    assert (integrated.runtime, integrated.threads, integrated.memory, integrated.verify_curve) == (
        "onnx",
        1,
        "cpu",
        (),
    )
    assert integrated.memory_bytes == 8_000_000_000
    assert machine.shared_bandwidth == (SharedBandwidth(devices=frozenset({"cpu", "Vulkan0"}), bytes_per_s=70e9),)
    assert machine.links == (Link(between=frozenset({"cpu", "Vulkan0"}), hand_over_s=0.0001),)
    assert (machine.target.devices, machine.target.layers) == ({"cpu"}, 24)
    small, lookup = machine.drafters
    assert small.model is not None
    assert (small.model.name, small.model.devices, small.acceptance) == ("small", frozenset(), (0.8, 1.0, 0.0))
    assert (lookup.model, lookup.acceptance) == (None, (0.2,))


@pytest.mark.parametrize("key", ["shared_bandwidth", "links", "drafters"])
def test_optional_keys_of_a_machine_description_may_be_left_out(key: str) -> None:
    machine = machine_from_table(changed(lambda table: table.pop(key)), "m.toml")
    assert getattr(machine, key) == ()


def test_a_described_target_without_layers_is_not_split() -> None:
    assert machine_from_table(changed(lambda table: table["target"].pop("layers")), "m.toml").target.layers is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("description",), "\x1b[2Jboo", "description must be a line"),
        (("description",), " ", "description must be a line"),
        (("context",), 127, "context must be a whole number from 128 to 1048576, got 127"),
        (("devices",), [], "devices must be a list of 1 to 64 entries"),
        (("devices",), ["cpu"], "devices 1 must be a table"),
        (("devices", 0, "kind"), "tpu", 'devices 1, kind must be "cpu" or "gpu" or "npu", got "tpu"'),
        (("devices", 0, "runtime"), "vllm", "devices 1, runtime must be"),
        (("devices", 0, "threads"), True, "devices 1, threads must be a whole number from 1 to 1024, got true"),
        (("devices", 0, "memory_bytes"), 0, "devices 1, memory_bytes must be"),
        (("devices", 0, "launch_s"), -1, "devices 1, launch_s must be a number from 0 to 10, got -1"),
        (("devices", 0, "verify_curve"), [[2, 1.0]], "pairs of a width and a ratio, ascending from [1, 1.0]"),
        (
            ("devices", 0, "verify_curve"),
            [[1, 1.0], [1, 2.0]],
            "pairs of a width and a ratio, ascending from [1, 1.0]",
        ),
        (("devices", 0, "verify_curve"), [[1, 1.0, 2]], "verify_curve 1 must be a list of 2 entries"),
        (("devices", 0, "verify_curve"), [[1, 1.0], [2, 0]], "verify_curve 2, 2 must be a number from 0.01"),
        (("devices", 0, "shares_memory_with"), "Vulkan0", "exclude each other"),
        (("devices", 1, "shares_memory_with"), "Vulkan0", 'shares_memory_with must be "cpu"'),
        (("devices", 1, "name"), "cpu", "is the name of another device"),
        (("shared_bandwidth", 0, "devices"), ["cpu"], "a list of 2 to 64 entries, got a list of length 1"),
        (
            ("shared_bandwidth", 0, "devices"),
            ["cpu", "cpu"],
            'devices: "cpu" occurs twice',
        ),
        (("shared_bandwidth", 0, "devices"), ["cpu", "GPU9"], 'names a device that is not described: "GPU9"'),
        (("shared_bandwidth", 0, "bytes_per_s"), 0, "bytes_per_s must be a number"),
        (("links", 0, "between"), ["cpu", "\x07"], "names a device that is not described"),
        (("links", 0, "hand_over_s"), 11, "hand_over_s must be a number from 0 to 10"),
        (("target",), [], "target must be a table, got a list of length 0"),
        (("target", "devices"), [], "a list of 1 to 64 entries"),
        (("target", "weights_bytes"), -5, "target, weights_bytes must be"),
        (("target", "operations_per_token"), 0, "target, operations_per_token must be"),
        (("target", "layers"), 1, "target, layers must be a whole number from 2 to 1000, got 1"),
        (("drafters", 0, "acceptance"), [], "drafters 1, acceptance must be a list"),
        (("drafters", 0, "acceptance"), [1.01], "acceptance 1 must be a number from 0 to 1, got 1.01"),
        (("drafters", 1, "kind"), "oracle", 'drafters 2, kind must be "model" or "lookup"'),
    ],
)
def test_an_invalid_value_in_a_machine_description_is_refused(
    path: tuple[Any, ...], value: object, words: str
) -> None:
    def put(table: Any) -> None:
        for step in path[:-1]:
            table = table[step]
        table[path[-1]] = value

    assert words in refusal(changed(put)).message


def test_a_link_needs_two_devices() -> None:
    third = {**TABLE["devices"][1], "name": "NPU"}

    def put(table: dict[str, Any]) -> None:
        table["devices"].append(third)
        table["links"][0]["between"] = ["cpu", "Vulkan0", "NPU"]

    assert "between must be a list of 2 entries" in refusal(changed(put)).message


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ((), "context"),
        ((), "target"),
        ((), "devices"),
        (("devices", 0), "name"),
        (("devices", 1), "shares_memory_with"),
        (("devices", 1), "launch_s"),
        (("target",), "kv_bytes_per_token"),
        (("drafters", 0), "acceptance"),
        (("links", 0), "hand_over_s"),
    ],
)
def test_a_missing_key_of_a_machine_description_is_named(place: tuple[Any, ...], key: str) -> None:
    def drop(table: Any) -> None:
        for step in place:
            table = table[step]
        del table[key]

    assert f"{key} is missing" in refusal(changed(drop)).message


@pytest.mark.parametrize(
    ("place", "key", "hint"),
    [
        ((), "contxt", 'Did you mean "context"?'),
        (("devices", 0), "memory_byte", 'Did you mean "memory_bytes"?'),
        (("devices", 0), "verify_curves", 'Did you mean "verify_curve"?'),
        (("target",), "acceptance", "Known keys: "),
        (("drafters", 0), "layers", "Known keys: "),
        (("drafters", 1), "weights_bytes", "Known keys: acceptance, kind."),
        (("links", 0), "seconds", "Known keys: between, hand_over_s."),
        (("shared_bandwidth", 0), "\x1b[31m", "Known keys: bytes_per_s, devices."),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_key(place: tuple[Any, ...], key: str, hint: str) -> None:
    def add(table: Any) -> None:
        for step in place:
            table = table[step]
        table[key] = 1

    error = refusal(changed(add))
    assert "unknown key " in error.message
    assert error.hint is not None
    assert hint in error.hint


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def outcome(table: dict[str, Any]) -> str:
    try:
        return machine_from_table(table, "m.toml").description
    except ProfileError as error:
        return error.message


@given(key=st.sampled_from(sorted(TABLE)), value=anything)
def test_any_malformed_machine_description_raises_a_one_line_error(key: str, value: object) -> None:
    assert is_line(outcome({**TABLE, key: value}))
