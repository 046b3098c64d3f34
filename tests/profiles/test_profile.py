"""Profiles: what the defaults are, which layer wins, where a value came from, and what each mistake says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgespec.errors import ProfileError
from edgespec.planning.depth.base import POLICY_NAMES
from edgespec.profiles.layers import ADVANCED_KEYS, KEYS
from edgespec.profiles.profile import Profile, list_profiles, load_profile

Load = Callable[..., Profile]

BUILT_IN = ("default", "laptop", "server", "two-devices")
OLD = ("desktop", "desktop-gpu", "laptop-battery", "npu")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / "profiles").mkdir(parents=True)
    return folder


@pytest.fixture
def load(project: Path, user: Path) -> Load:
    def call(
        name: str | None = None, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None, **flags: object
    ) -> Profile:
        return load_profile(name, environ=environ or {}, cwd=cwd or project, user_dir=user, flags=flags)

    return call


def failure(load: Load, *args: object, **kwargs: object) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        load(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value


# ----------------------------------------------------------------------------------------------- defaults


@pytest.mark.parametrize("name", [None, "default", "laptop"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", "qwen2.5-coder-1.5b"),
        ("draft", "auto"),
        ("context", "auto"),
        ("depth", "auto"),
        ("depth_policy", "cost"),
        ("rule", "keyed"),
        ("exactness", "stable"),
        ("threads", "auto"),
        ("device", "auto"),
        ("draft_device", "auto"),
        ("runtime", "auto"),
        ("draft_runtime", "auto"),
        ("draft_isolation", "auto"),
        ("draft_head", "auto"),
        ("draft_weights", "auto"),
        ("gpu_layers", "auto"),
        ("max_memory_fraction", 0.8),
        ("lookup", True),
        ("native_sidecar", True),
    ],
)
def test_default_values_of_the_default_profile(load: Load, name: str | None, key: str, value: object) -> None:
    found = getattr(load(name), key)
    assert found == value
    assert type(found) is type(value)


def test_every_value_has_an_origin(load: Load) -> None:
    profile = load("laptop")
    assert set(profile.origins) == set(profile.values()) == {"name", "description", *KEYS}
    assert profile.origins["name"] == "--profile"
    assert profile.origins["target"] == "built-in laptop.toml"
    assert profile.origins["threads"] == "built-in default.toml"
    assert load().origins["name"] == "built-in"


# What each built-in profile inherits from, and what it wants otherwise than the default.
DIFFERENCES: dict[str, tuple[str, dict[str, object]]] = {
    "default": ("default", {}),
    "laptop": ("default", {}),
    "server": ("default", {"max_memory_fraction": 0.9}),
    "two-devices": ("default", {"mode": "pipelined"}),
    "laptop-battery": ("default", {"draft": "none", "context": 2048}),
    "desktop": ("default", {"device": "cpu", "draft_device": "cpu"}),
    "desktop-gpu": ("default", {}),
    "npu": ("default", {"context": 2048, "max_memory_fraction": 0.6}),
}


@pytest.mark.parametrize("name", [*BUILT_IN, *OLD])
def test_every_built_in_profile_loads_and_says_where_its_values_are_from(load: Load, name: str) -> None:
    parent, differences = DIFFERENCES[name]
    profile, default = load(name), load("default")
    assert {key: getattr(profile, key) for key in KEYS} == {key: getattr(default, key) for key in KEYS} | differences
    assert set(profile.origins) == {"name", "description", *KEYS}
    assert profile.origins["description"] == f"built-in {name}.toml"
    origins = {profile.origins[key] for key in KEYS}
    assert origins <= {f"built-in {file}.toml" for file in (name, parent, "default")}
    assert f"built-in {parent}.toml" in origins
    for key in differences:
        assert profile.origins[key] == f"built-in {name}.toml"


def test_a_profile_that_is_not_listed_any_more_says_what_it_stands_for(load: Load, user: Path) -> None:
    assert not {summary.name for summary in list_profiles(user)} & set(OLD)
    assert load("laptop-battery").old == (
        'the profile laptop-battery is not listed any more; it stands for draft = "none", context = 2048'
    )
    assert [load(name).old for name in BUILT_IN] == [None] * len(BUILT_IN)


def test_at_most_twelve_keys_are_outside_the_advanced_table() -> None:
    assert len(set(KEYS) - set(ADVANCED_KEYS)) <= 12


def test_a_built_in_profile_names_no_device_but_the_processor(load: Load) -> None:
    for name in BUILT_IN:  # other names depend on the build
        assert {load(name).device, load(name).draft_device} <= {"auto", "cpu"}


def test_built_in_profiles_have_distinct_descriptions_of_one_line(user: Path) -> None:
    descriptions = [summary.description for summary in list_profiles(user)]
    assert len(set(descriptions)) == len(BUILT_IN)
    assert all(10 < len(description) <= 100 for description in descriptions)


def test_a_profile_cannot_be_changed(load: Load) -> None:
    profile = load()
    with pytest.raises(AttributeError):
        profile.context = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.origins["context"] = "me"  # type: ignore[index]


# ------------------------------------------------------------------------------------------------- layers


def test_each_layer_overrides_the_one_below(load: Load, user: Path, project: Path) -> None:
    assert load("laptop").context == "auto"

    config = user / "config.toml"
    config.write_text("[profile]\ncontext = 1001\n")
    assert (load("laptop").context, load("laptop").origins["context"]) == (1001, str(config))

    own = user / "profiles" / "laptop.toml"
    own.write_text("context = 1002\n")
    assert (load("laptop").context, load("laptop").origins["context"]) == (1002, str(own))
    assert load("default").context == 1001, "the user's laptop profile does not change the default"

    at_project = project / "edgespec.toml"
    at_project.write_text("[profile]\ncontext = 1003\n")
    assert (load("laptop").context, load("laptop").origins["context"]) == (1003, str(at_project))

    environ = {"EDGESPEC_CONTEXT": "1004"}
    profile = load("laptop", environ=environ)
    assert (profile.context, profile.origins["context"]) == (1004, "EDGESPEC_CONTEXT")

    profile = load("laptop", environ=environ, context=1005)
    assert (profile.context, profile.origins["context"]) == (1005, "--context")
    assert profile.origins["target"] == "built-in laptop.toml", "an override touches its own key only"


def test_the_nearest_project_file_in_parent_folders_is_used(load: Load, project: Path) -> None:
    (project / "edgespec.toml").write_text("[profile]\nthreads = 3\n")
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    assert load(cwd=inner).threads == 3
    (project / "a" / "edgespec.toml").write_text("[profile]\nthreads = 5\n")
    assert load(cwd=inner).threads == 5


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such owners")
@pytest.mark.parametrize("linked", [False, True])
def test_another_users_project_file_is_not_read(
    load: Load, project: Path, user: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    file, inner = project / "edgespec.toml", project / "inner"
    inner.mkdir()
    named = user / "theirs.toml" if linked else file
    named.write_text("[profile]\nthreads = 5\n")
    if linked:
        file.symlink_to(named)
    assert (load(cwd=inner).threads, load(cwd=inner).ignored) == (5, None)
    if os.geteuid() == 0:
        os.chown(named, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    profile = load(cwd=inner)
    assert profile.threads == "auto"
    assert profile.ignored == f"{file} is another user's file and was not read; a copy that is yours is read"


OPTIONS = {"target": "MODEL", "draft": "--draft", "context": "--context", "threads": "--threads"}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("target", "smollm2-135m", "smollm2-135m"),
        ("draft", "none", "none"),
        ("context", "2048", 2048),
        ("depth", "0", 0),
        ("depth", "auto", "auto"),
        ("rule", "rejection", "rejection"),
        *[("depth_policy", name, name) for name in POLICY_NAMES],
        ("depth_policy", "bandit", "cost"),
        ("exactness", "near", "near"),
        ("threads", "6", 6),
        ("device", "Vulkan0", "Vulkan0"),
        ("draft_device", "cpu", "cpu"),
        ("runtime", "native", "native"),
        ("runtime", "llama", "llama"),
        ("draft_runtime", "native", "native"),
        ("draft_runtime", "llama", "llama"),
        ("draft_isolation", "process", "process"),
        ("draft_isolation", "thread", "thread"),
        ("draft_head", "whole", "whole"),
        ("draft_weights", "file", "file"),
        ("gpu_layers", "0", 0),
        ("max_memory_fraction", "0.5", 0.5),
        ("max_memory_fraction", "1", 1.0),
        ("lookup", "off", False),
        ("lookup", "TRUE", True),
        ("native_sidecar", "off", False),
    ],
)
def test_every_key_can_come_from_the_environment_and_from_an_option(
    load: Load, key: str, text: str, value: object
) -> None:
    variable = f"EDGESPEC_{key.upper()}"
    by_environment = load(environ={variable: text})
    assert getattr(by_environment, key) == value
    assert by_environment.origins[key] == variable
    by_option = load(**{key: text})
    assert getattr(by_option, key) == value
    assert by_option.origins[key] == OPTIONS.get(key, f"--set {key}")
    assert getattr(load(**{key: value}), key) == value


def test_a_command_names_the_models_that_it_would_not_have_without_options(load: Load, user: Path) -> None:
    path = str(user / "My Models" / "x.gguf")
    for flags, named in (
        ({}, ""),
        ({"target": "qwen2.5-coder-1.5b", "draft": "auto"}, ""),
        ({"target": "smollm2-135m"}, " smollm2-135m"),
        ({"target": path, "draft": "none"}, f' "{path}" --draft none'),
    ):
        assert load(**flags).command("calibrate") == f"edgespec calibrate{named}"
    assert load(environ={"EDGESPEC_TARGET": "smollm2-135m"}).command("verify") == "edgespec verify"
    (user / "profiles" / "mine.toml").write_text('target = "smollm2-135m"', encoding="utf-8")
    assert load("mine").command("verify") == "edgespec verify smollm2-135m", "an option named the profile"
    assert load(environ={"EDGESPEC_PROFILE": "mine"}).command("verify") == "edgespec verify"
    (user / "config.toml").write_text('[profile]\ntarget = "smollm2-135m"', encoding="utf-8")
    assert load("laptop").command("verify") == "edgespec verify"
    assert load(target="qwen2.5-coder-1.5b").command("verify") == "edgespec verify qwen2.5-coder-1.5b"


def test_an_empty_variable_and_an_option_not_given_count_as_unset(load: Load) -> None:
    profile = load(environ={"EDGESPEC_CONTEXT": " ", "EDGESPEC_PROFILE": ""}, context=None)
    assert (profile.name, profile.context) == ("default", "auto")


def test_unrelated_edgespec_variables_are_ignored(load: Load) -> None:
    assert load(environ={"EDGESPEC_HOME": "/x", "EDGESPEC_SOMETHING": "1"}).context == "auto"


# ------------------------------------------------------------------------------------ choosing a profile


def test_option_then_variable_then_project_then_user_choose_the_profile(
    load: Load, user: Path, project: Path
) -> None:
    for name in ("one", "two", "three", "four"):
        (user / "profiles" / f"{name}.toml").write_text(f'description = "{name}"\n')
    (user / "config.toml").write_text('[profile]\ninherits = "one"\n')
    assert (load().name, load().origins["name"]) == ("one", str(user / "config.toml"))
    (project / "edgespec.toml").write_text('[profile]\ninherits = "two"\n')
    assert (load().name, load().origins["name"]) == ("two", str(project / "edgespec.toml"))
    environ = {"EDGESPEC_PROFILE": "three"}
    assert (load(environ=environ).name, load(environ=environ).origins["name"]) == ("three", "EDGESPEC_PROFILE")
    assert load("four", environ=environ).description == "four"


def test_a_file_can_be_a_profile(load: Load, project: Path) -> None:
    file = project / "mine.toml"
    file.write_text('inherits = "laptop"\ncontext = 512\n')
    for name in ("./mine.toml", "mine.toml", str(file)):
        profile = load(name)
        assert (profile.name, profile.context, profile.origins["context"]) == ("mine", 512, str(file))
        assert profile.origins["target"] == "built-in laptop.toml"
    assert load(environ={"EDGESPEC_PROFILE": str(file)}).context == 512


def test_a_path_in_inherits_is_relative_to_the_file_that_names_it(load: Load, user: Path, project: Path) -> None:
    (user / "profiles" / "base.toml").write_text("context = 700\n")
    for inherits in ("base.toml", "../profiles/base.toml", str(user / "profiles" / "base.toml")):
        (user / "profiles" / "top.toml").write_text(f"inherits = '{inherits}'\n")
        assert load("top").context == 700
    (project / "mine.toml").write_text("context = 800\n")
    (project / "edgespec.toml").write_text('[profile]\ninherits = "mine.toml"\n')
    inner = project / "inner"
    inner.mkdir()
    profile = load(cwd=inner)
    assert (profile.name, profile.context) == ("mine", 800)


def test_users_profiles_inherit_from_each_other_and_from_the_default(load: Load, user: Path) -> None:
    (user / "profiles" / "base.toml").write_text("context = 700\ndepth = 3\n")
    (user / "profiles" / "top.toml").write_text('inherits = "base"\ndepth = 4\n')
    profile = load("top")
    assert (profile.context, profile.depth, profile.rule) == (700, 4, "keyed")
    assert profile.origins["context"].endswith("base.toml")


def test_a_users_default_may_be_the_laptop_and_does_not_change_the_laptop(load: Load, user: Path) -> None:
    (user / "profiles" / "default.toml").write_text('inherits = "laptop"\nthreads = 2\n')
    assert load().threads == 2
    assert load("laptop").threads == "auto"


def test_a_relative_model_path_is_relative_to_the_file_that_names_it(load: Load, user: Path, project: Path) -> None:
    (project / "edgespec.toml").write_text('[profile]\ntarget = "models/a.gguf"\ndraft = "b.gguf"\n')
    inner = project / "inner"
    inner.mkdir()
    profile = load(cwd=inner)
    assert profile.target == str(project / "models" / "a.gguf")
    assert profile.draft == str(project / "b.gguf")
    on_the_hub = (
        "hf:org/repo@main/x.gguf",
        "org/repo.1",
        "org/repo:UD-Q4_K_XL",
        "hf.co/org/repo",
        "https://hf.co/a/b",
    )
    for kept in (*on_the_hub, "/abs/x.gguf", "smollm2-135m"):
        (project / "edgespec.toml").write_text(f'[profile]\ntarget = "{kept}"\n')
        assert load().target == kept
    for path in ("org/model.gguf", "./org/repo", "org/repo/inner", "inner/repo"):
        (project / "edgespec.toml").write_text(f'[profile]\ntarget = "{path}"\n')
        assert load().target == str(project / path)
    assert load(target="models/a.gguf").target == "models/a.gguf", "an option is relative to the current folder"


def test_listing_shows_all_and_survives_a_broken_file(user: Path) -> None:
    (user / "profiles" / "mine.toml").write_text('description = "Mine"\n')
    (user / "profiles" / "heir.toml").write_text('inherits = "mine"\n')
    (user / "profiles" / "broken.toml").write_text("context = \n")
    listed = {summary.name: summary for summary in list_profiles(user)}
    assert list(listed) == sorted([*BUILT_IN, "broken", "heir", "mine"])
    assert listed["laptop"].origin == "built-in laptop.toml"
    assert listed["laptop"].description
    assert listed["mine"].description == listed["heir"].description == "Mine"
    assert listed["broken"].problem is not None
    assert "line 1" in listed["broken"].problem
    assert tuple(summary.name for summary in list_profiles(user / "nowhere")) == BUILT_IN


# --------------------------------------------------------------------------------------------------- errors


def test_an_unknown_key_is_an_error_with_a_suggestion(load: Load, user: Path, project: Path) -> None:
    file = user / "profiles" / "mine.toml"
    file.write_text("contxt = 4\n")
    error = failure(load, "mine")
    assert error.message == f'{file}: unknown key "contxt"'
    assert error.hint == 'Did you mean "context"?'
    file.write_text("zzz = 4\n")
    assert "max_memory_fraction" in str(failure(load, "mine").hint)
    assert 'Did you mean "threads"?' in str(failure(load, thread=3).hint)
    assert failure(load, n_ctx=512).hint == 'Did you mean "context"?'
    (project / "edgespec.toml").write_text("context = 4096\n")
    assert "[profile]" in str(failure(load).hint)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("target = 3", "target must be a MODEL"),
        ('target = " "', "target must be a MODEL"),
        ("draft = false", 'draft must be a MODEL, "auto" or "none", got false'),
        ("context = 100", 'context must be "auto" or a number of tokens from 128 to 1048576, got 100'),
        ('context = "4096"', 'context must be "auto" or a number of tokens from 128 to 1048576, got "4096"'),
        ("context = 4096.0", "got 4096.0"),
        ("depth = 17", 'depth must be "auto" or a whole number from 0 to 16, got 17'),
        ("depth = -1", "got -1"),
        ('rule = "exact"', 'rule must be "keyed" or "rejection", got "exact"'),
        ('depth_policy = "deep"', 'depth_policy must be "cost" or "fixed" or "entropy" or "confidence", got "deep"'),
        ('exactness = "Near"', 'exactness must be "stable" or "near", got "Near"'),
        ("threads = 0", 'threads must be "auto" or a whole number from 1 to 1024, got 0'),
        ("threads = true", "got true"),
        ("device = 1", "device must be"),
        ("draft_device = []", "draft_device must be"),
        ('runtime = "onnx"', 'runtime must be "auto" or "llama" or "native", got "onnx"'),
        ("draft_runtime = 1", 'draft_runtime must be "auto" or "llama" or "native", got 1'),
        ("draft_isolation = true", 'draft_isolation must be "auto" or "process" or "thread", got true'),
        ('gpu_layers = "all"', 'gpu_layers must be "auto" or a whole number from 0 to 10000, got "all"'),
        ("max_memory_fraction = 0", "max_memory_fraction must be a number above 0 and up to 1, got 0"),
        ("max_memory_fraction = nan", "got nan"),
        ("max_memory_fraction = 1.5", "got 1.5"),
        ("lookup = 1", "lookup must be true or false, got 1"),
        ("description = 1", "description must be a text, got 1"),
        ("inherits = 1", "inherits must be the name of a profile, got 1"),
    ],
)
def test_a_wrong_value_names_file_key_what_was_given_and_what_is_allowed(
    load: Load, user: Path, line: str, says: str
) -> None:
    file = user / "profiles" / "mine.toml"
    file.write_text(f"{line}\n")
    message = failure(load, "mine").message
    assert message.startswith(f"{file}: ")
    assert says in message


def test_a_wrong_value_of_a_variable_or_an_option_names_it(load: Load) -> None:
    error = failure(load, environ={"EDGESPEC_CONTEXT": "lots"})
    assert error.message == 'EDGESPEC_CONTEXT must be "auto" or a number of tokens from 128 to 1048576, got "lots"'
    assert failure(load, depth="99").message.startswith("--set depth must be")
    assert failure(load, max_memory_fraction="7").message.startswith("--set max_memory_fraction must be")
    assert failure(load, environ={"EDGESPEC_LOOKUP": "maybe"}).message.endswith('got "maybe"')


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"context = 4096\nrule = \n", "line 2: not valid TOML: Invalid value"),
        (b"[profile\n", "line 1: not valid TOML"),
        (b'a = 1\n\nb = "open', "line 3: not valid TOML"),
        (b"context = 4096\n# caf\xe9\n", "line 2: not UTF-8 text"),
        (b"#" * 1_000_001, "larger than 1 MB"),
        (b"a = " + b"[" * 100_000, "deeply"),
    ],
)
def test_a_malformed_file_names_file_and_line(load: Load, user: Path, content: bytes, says: str) -> None:
    file = user / "profiles" / "mine.toml"
    file.write_bytes(content)
    message = failure(load, "mine").message
    assert str(file) in message
    assert says in message


def test_a_profile_may_start_with_a_byte_order_mark(load: Load, user: Path) -> None:
    (user / "profiles" / "mine.toml").write_bytes(b"\xef\xbb\xbfcontext = 900\n")
    assert load("mine").context == 900


def test_an_unknown_profile_lists_the_known_ones_and_the_nearest(load: Load, user: Path) -> None:
    (user / "profiles" / "desk.toml").touch()
    error = failure(load, "latop")
    assert error.message == 'there is no profile "latop"'
    known = ", ".join(sorted([*BUILT_IN, "desk"]))
    assert error.hint == f"Did you mean laptop? Known profiles: {known}."
    assert "no profile file" in failure(load, "./nowhere.toml").message
    assert "no profile file" in failure(load, f"./{'x' * 300}.toml").message
    assert "no profile file" in failure(load, "~absent-user/x.toml").message
    assert "no profile file" in failure(load, "../profiles/desk").message
    (user / "profiles" / "desk.toml").write_text('inherits = "gone"\n')
    assert failure(load, "desk").message == 'there is no profile "gone"'


def test_profiles_that_inherit_in_a_circle_are_an_error(load: Load, user: Path) -> None:
    (user / "profiles" / "a.toml").write_text('inherits = "b"\n')
    (user / "profiles" / "b.toml").write_text('inherits = "a"\n')
    assert failure(load, "a").message == "profile a inherits from itself: a -> b -> a"
    (user / "profiles" / "c.toml").write_text('inherits = "../profiles/c.toml"\n')
    own = str(user / "profiles" / "c.toml")
    assert failure(load, own).message == f"profile {own} inherits from itself: {own} -> {own}"


def test_a_profile_key_that_is_not_a_table_is_an_error(load: Load, project: Path) -> None:
    (project / "edgespec.toml").write_text('profile = "laptop"\n')
    assert "must be a table" in failure(load).message


def test_the_catalogue_file_is_not_listed_as_a_profile(load: Load) -> None:
    assert failure(load, "catalogue").message == 'there is no profile "catalogue"'


# ------------------------------------------------------------------------------------------ the advanced table


def advanced_profile(tmp_path: Path, text: str) -> Profile:
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    return load_profile("./mine.toml", environ={}, cwd=tmp_path, user_dir=tmp_path, only_the_named=True)


@pytest.mark.parametrize("text", ['draft_head = "whole"', '[advanced]\ndraft_head = "whole"'])
def test_an_advanced_key_is_read_in_its_table_and_where_0_1_0_had_it(tmp_path: Path, text: str) -> None:
    profile = advanced_profile(tmp_path, text)
    assert profile.draft_head == "whole"
    assert profile.origins["draft_head"] == str(tmp_path / "mine.toml")


def test_the_advanced_table_wins_over_the_old_place(tmp_path: Path) -> None:
    profile = advanced_profile(tmp_path, 'draft_weights = "auto"\n[advanced]\ndraft_weights = "file"')
    assert profile.draft_weights == "file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[advanced]\ncontext = 512", r'\[advanced\]: unknown key "context"'),
        ('[advanced]\ndraft_heads = "whole"', r'\[advanced\]: unknown key "draft_heads"'),
        ('[advanced]\ndraft_head = "half"', "draft_head must be"),
        ("advanced = 3", r"advanced must be a table, \[advanced\], got 3"),
    ],
)
def test_a_mistake_in_the_advanced_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        advanced_profile(tmp_path, text)
