"""Models of Ollama: their names, what Ollama keeps with the weights, and what of that is obeyed, refused or named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec import Engine, Sampling
from edgespec.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, TemplateError
from edgespec.files.home import Home
from edgespec.files.model_file import KeptSettings
from edgespec.store.found import ModelFolders, find_models
from edgespec.store.locate import Locator
from edgespec.store.ollama import find_ollama, kept_settings
from edgespec.store.on_disk import files_on_disk
from edgespec.store.store import Store
from tests.support.command_line import run_here
from tests.support.other_programs import LIBRARY, User
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels, read_all, shown

PARAMETERS = {
    "stop": ["<|im_start|>", "STOP"],
    "temperature": 0.25,
    "top_k": 7,
    "num_ctx": 512,
    "num_gpu": 1,
    "seed": 3,
}


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "user")


@pytest.fixture
def weights(tiny: TinyModels) -> bytes:
    return tiny.target.read_bytes()


def kept(user: User, name: str) -> KeptSettings:
    return kept_settings(find_ollama([user.ollama], name))


# -------------------------------------------------------------------------------------------------------- names

NAMES = {
    f"{LIBRARY}/smol/latest": "smol:latest",
    f"{LIBRARY}/smol/135m": "smol:135m",
    f"{LIBRARY}/Caps/Q4_0": "Caps:Q4_0",
    "registry.ollama.ai/someone/tuned/latest": "someone/tuned:latest",
    "hf.co/org/repo-GGUF/Q4_K_M": "hf.co/org/repo-GGUF:Q4_K_M",
    "localhost:5000/me/mine/latest": "localhost:5000/me/mine:latest",
    "registry.example/library/theirs/v1": "registry.example/library/theirs:v1",
}


def test_every_name_that_ollama_lists_is_listed_and_found(user: User, weights: bytes) -> None:
    for place in NAMES:
        user.to_ollama(place, weights)  # one file under seven names
    assert sorted(user.names()) == sorted(f"ollama:{name}" for name in NAMES.values())
    for name in NAMES.values():
        assert find_ollama([user.ollama], name).name == f"ollama:{name}"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("smol", "smol:latest"),
        ("library/smol:135m", "smol:135m"),
        ("registry.ollama.ai/library/smol", "smol:latest"),
        ("https://registry.ollama.ai/someone/tuned", "someone/tuned:latest"),
        ("someone/tuned", "someone/tuned:latest"),
        ("caps:q4_0", "Caps:Q4_0"),
        ("HF.co/org/repo-gguf:q4_k_m", "hf.co/org/repo-GGUF:Q4_K_M"),
        ("localhost:5000/me/mine", "localhost:5000/me/mine:latest"),
    ],
)
def test_a_name_may_be_typed_in_full_without_its_tag_and_in_any_case(
    user: User, weights: bytes, typed: str, found: str
) -> None:
    for place in NAMES:
        user.to_ollama(place, weights)
    assert find_ollama([user.ollama], typed).name == f"ollama:{found}"


def test_an_unknown_name_is_answered_with_the_known_ones(user: User, weights: bytes) -> None:
    user.to_ollama(f"{LIBRARY}/smol/latest", weights)
    with pytest.raises(ModelNotFoundError, match="Ollama has no model 'smol:7b'") as caught:
        find_ollama([user.ollama], "smol:7b")
    assert caught.value.hint == "Ollama has ollama:smol:latest"
    with pytest.raises(ModelNotFoundError) as caught:
        find_ollama([user.root / "absent"], "smol")
    assert caught.value.hint == "no model of Ollama was found on this machine"


# ----------------------------------------------------------------------------------------------- further layers


def test_a_model_with_an_adapter_is_listed_and_refused_by_name(user: User, weights: bytes, tmp_path: Path) -> None:
    user.layers_to_ollama(f"{LIBRARY}/lora/latest", weights, adapter=b"GGUF")
    (model,) = find_models(user.folders).models
    assert (model.name, model.refused) == ("ollama:lora:latest", "it has an adapter, which edgespec cannot apply")
    with pytest.raises(InvalidRequestError, match="Ollama's model lora:latest cannot be run: it has an adapter"):
        find_ollama([user.ollama], "lora")
    shown = run_here("models", home=tmp_path / "home", env=user.environment).out
    assert "cannot run: it has an adapter" in shown


def test_settings_are_read_and_those_that_are_not_obeyed_are_named(user: User, weights: bytes) -> None:
    user.layers_to_ollama(
        f"{LIBRARY}/pirate/latest",
        weights,
        system="You are a pirate. \u2693".encode(),
        params=json.dumps(PARAMETERS).encode(),
        template=b"{{ .Prompt }}",
        license=b"MIT",
        messages=b"[]",
    )
    settings = kept(user, "pirate")
    assert settings == KeptSettings(
        program="Ollama",
        system="You are a pirate. \u2693",
        stop=("<|im_start|>", "STOP"),
        sampling={"temperature": 0.25, "top_k": 7},
        has_template=True,
        unused=("messages", "num_ctx", "seed"),
    )
    assert settings.note == "not used of Ollama's settings for this model: messages, num_ctx, seed"


def test_a_model_may_have_the_name_of_ollamas_folder(user: User, weights: bytes) -> None:
    user.layers_to_ollama(f"{LIBRARY}/manifests/latest", weights, system=b"Be brief.")
    assert kept(user, "manifests").system == "Be brief."


def test_a_model_without_settings_has_nothing_to_tell(user: User, weights: bytes) -> None:
    user.layers_to_ollama(f"{LIBRARY}/smol/latest", weights)
    assert kept(user, "smol") == KeptSettings(program="Ollama")
    assert kept(user, "smol").note is None


@pytest.mark.parametrize(
    ("parameters", "stop", "unused"),
    [
        ({"stop": "END"}, ("END",), ()),
        ({"stop": ["", "END", 3]}, ("END",), ("stop",)),
        ({"stop": {"a": 1}}, (), ("stop",)),
        ({"temperature": "hot", "top_p": True}, (), ("temperature", "top_p")),
        ({"mirostat": 2, "use_mmap": True, "num_thread": 4}, (), ("mirostat",)),
        ({"\x1b[2J": 1, "a" * 100: 1, "tfs_z": 1}, (), ("tfs_z",)),
        ([1, 2], (), ()),
    ],
)
def test_odd_parameters_are_used_where_they_can_be(
    user: User, weights: bytes, parameters: object, stop: tuple[str, ...], unused: tuple[str, ...]
) -> None:
    user.layers_to_ollama(f"{LIBRARY}/odd/latest", weights, params=json.dumps(parameters).encode())
    assert (kept(user, "odd").stop, kept(user, "odd").sampling, kept(user, "odd").unused) == (stop, {}, unused)


@pytest.mark.parametrize("damaged", [{"params": b"{"}, {"system": b"\xff"}, {"params": b"[" * 10**5}])
def test_damaged_settings_are_one_error_and_not_left_out(
    user: User, weights: bytes, damaged: dict[str, bytes]
) -> None:
    user.layers_to_ollama(f"{LIBRARY}/bad/latest", weights, **damaged)
    with pytest.raises(ModelFileError, match="Ollama's settings of ollama:bad:latest cannot be read"):
        kept(user, "bad")


def test_a_projector_with_the_model_counts_as_a_vision_part(user: User, weights: bytes, tmp_path: Path) -> None:
    user.layers_to_ollama(f"{LIBRARY}/seeing/latest", weights, projector=b"GGUF")
    shown = run_here("models", home=tmp_path / "home", env=user.environment).out
    assert "Ollama, llama, text runs on our kernels, images are left out\n" in shown
    asked = ("generate", "hi", "--target", "ollama:seeing", "--draft", "none", "--max-tokens", "2")
    said = run_here(*asked, home=tmp_path / "home", env=user.environment).err
    assert "images are left out: this file's vision part is not used" in said


# -------------------------------------------------------------------------------------------------- as it runs


SCRIPT = ["Hello", " there", " friend", "<|im_end|>"]


def load(user: User, home: Path, name: str) -> Engine:
    return Engine.load(f"ollama:{name}", store_home=Home(home), draft="none", threads=1)


@pytest.fixture
def _ollama(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(user.ollama))


@pytest.mark.usefixtures("_ollama")
def test_a_short_name_is_ollamas_only_if_ollama_has_it_here(user: User, weights: bytes, tmp_path: Path) -> None:
    user.to_ollama(f"{LIBRARY}/smollm2-135m/latest", weights)
    user.to_ollama(f"{LIBRARY}/llama3.2/3b", weights)
    locator = Locator(store=Store(Home(tmp_path / "home")))
    locator.check("llama3.2:3b")
    assert locator.locate("llama3.2:3b").name == "llama3.2:3b"
    for name in ("llama3.2:1b", "llama3.2"):
        for find in (locator.check, locator.locate):
            with pytest.raises(ModelNotFoundError):
                find(name)
    for name, hint in (("llama3.2", "ollama:llama3.2:3b"), ("lama3.2:3b", "ollama:llama3.2:3b"), ("absent", "known")):
        with pytest.raises(ModelNotFoundError) as unknown:
            locator.check(name)
        assert hint in str(unknown.value.hint)
        assert "ollama:NAME or hf:ORG/REPO works too" in str(unknown.value.hint)
    assert locator.locate("smollm2-135m:latest").name == "smollm2-135m:latest"
    for name in ("smollm2-135m", "gemma3-270m:latest"):  # the catalogue's comes first
        with pytest.raises(ModelNotFoundError, match=f"{name.removesuffix(':latest')} is not on this machine"):
            locator.locate(name)


@pytest.mark.usefixtures("_ollama")
def test_ollamas_system_message_stop_texts_and_sampling_are_obeyed(user: User, tmp_path: Path) -> None:
    scripted = write_scripted_gguf(tmp_path / "scripted.gguf", SCRIPT).read_bytes()
    parameters = json.dumps({"stop": [" friend"], "temperature": 0.25, "top_k": 7, "repeat_last_n": 9}).encode()
    user.layers_to_ollama(f"{LIBRARY}/pirate/latest", scripted, system=b"You are a pirate.", params=parameters)
    user.layers_to_ollama(f"{LIBRARY}/plain/latest", scripted)
    texts = {}
    for name in ("pirate", "plain"):
        with load(user, tmp_path / "home", name) as engine, engine.session() as session:
            asked = [{"role": "user", "content": "Hi"}]
            texts[name] = shown(read_all(session.generate(messages=asked))[0])
            prompts = engine.pair.prompts
            assert ("pirate" in prompts.read(asked)) is (name == "pirate")
            assert "pirate" not in prompts.read([{"role": "system", "content": "Be brief."}, *asked])
            sampling = engine.file_sampling
            drawn = (sampling.temperature, sampling.top_k, sampling.repeat_last_n)
            assert drawn == ((0.25, 7, 9) if name == "pirate" else (0.0, 0, -1))
    assert texts == {"pirate": "Hello there", "plain": "Hello there friend"}


@pytest.mark.usefixtures("_ollama")
def test_sampling_that_cannot_be_is_left_out(user: User, weights: bytes, tmp_path: Path) -> None:
    user.layers_to_ollama(f"{LIBRARY}/odd/latest", weights, params=b'{"temperature": -3, "top_k": 7}')
    with load(user, tmp_path / "home", "odd") as engine:
        assert engine.file_sampling == Sampling()


@pytest.mark.usefixtures("_ollama")
def test_a_template_that_only_ollama_keeps_is_named_in_the_hint(user: User, tiny: TinyModels, tmp_path: Path) -> None:
    bare = tiny.without_template.read_bytes()
    user.layers_to_ollama(f"{LIBRARY}/own/latest", bare, template=b"{{ .Prompt }}")
    user.layers_to_ollama(f"{LIBRARY}/bare/latest", bare)
    for name, keeps in (("own", True), ("bare", False)):
        with load(user, tmp_path / "home", name) as engine, engine.session() as session:
            with pytest.raises(TemplateError, match=f"{name} has no chat template") as caught:
                session.generate("Hi")
            assert ("Ollama keeps a template for it in its own language" in (caught.value.hint or "")) is keeps


@pytest.mark.usefixtures("_ollama")
def test_a_model_with_an_adapter_never_drafts(user: User, weights: bytes, tmp_path: Path) -> None:
    user.layers_to_ollama(f"{LIBRARY}/lora/latest", weights, adapter=b"GGUF")
    folders = ModelFolders((tmp_path / "none"), (user.ollama,), ())
    assert [file.name for file in files_on_disk(Store(Home(tmp_path / "home")), folders)] == []
    user.layers_to_ollama(f"{LIBRARY}/plain/latest", weights)
    assert [file.name for file in files_on_disk(Store(Home(tmp_path / "home")), folders)] == ["ollama:plain:latest"]


@pytest.mark.usefixtures("_ollama")
def test_settings_that_are_not_obeyed_are_named_when_the_model_is_loaded(
    user: User, weights: bytes, tmp_path: Path
) -> None:
    user.layers_to_ollama(f"{LIBRARY}/smol/latest", weights, params=json.dumps(PARAMETERS).encode())
    asked = ("generate", "hi", "--target", "ollama:smol", "--draft", "none", "--max-tokens", "2")
    said = run_here(*asked, home=tmp_path / "home", env=user.environment).err
    assert said.count("not used of Ollama's settings for this model: num_ctx, seed") == 1
