"""Model defaults and overrides in engine, LLM, server and commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLMEngine, EngineConfig, InvalidRequestError, ModelLoadError
from asyncllm.callbacks import stream_with_callbacks
from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.cli.arguments import engine_options, parse
from asyncllm.cli.session import model_name
from asyncllm.gpu.transformers_model.config import TransformersConfig, _read_config, read_config
from asyncllm.metrics import EngineMetrics
from asyncllm.serving import create_app
from asyncllm.testing import fake_engine, fake_llm
from tests.app_clients import app_client, user
from tests.checkpoints import DEMO_MODEL, make_checkpoint
from tests.fakes import sampling_of
from tests.model_configs import LLAMA, QWEN3

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SMALL: dict[str, Any] = {"num_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 64}


def demo_with(path: Path, file: str, **values: Any) -> Path:
    """A copy of the packaged model with fields of a JSON file replaced."""
    shutil.copytree(DEMO_MODEL, path, dirs_exist_ok=True)
    found = json.loads((path / file).read_text(encoding="utf-8"))
    (path / file).write_text(json.dumps(found | values))
    return path


@pytest.mark.parametrize(("setting", "temperature", "top_p"), [("auto", 0.6, 0.9), ("none", 1, 1)])
async def test_defaults_of_the_model_are_taken_or_not(setting, temperature, top_p):
    engine = AsyncLLMEngine(generation_config=setting, **SMALL)
    async with app_client(engine) as client:
        stream = engine.stream("Once", max_tokens=1)
        sampling = sampling_of(stream)
        await stream.result()
        assert (sampling.temperature, sampling.top_p) == (temperature, top_p)
        assert engine.model_config.eos_token_ids == (2, 0)
        body = {"input": "Hi", "max_output_tokens": 1, "store": False}
        answer = (await client.post("/v1/responses", json=body)).json()
    assert (answer["temperature"], answer["top_p"]) == (temperature, top_p)


def test_bad_model_defaults_are_harmless_when_ignored(tmp_path):
    path = demo_with(tmp_path / "bad", "generation_config.json", temperature=-1)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: temperature=-1"):
        LLM(path, **SMALL)
    with LLM(path, generation_config="none", **SMALL) as llm:
        assert llm.generate("Once", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_transformers_modules_ignore_the_defaults_too(tmp_path):
    make_checkpoint(tmp_path, "GemmaForCausalLM", eos_token_id=3)
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.25, "eos_token_id": 5}')
    found = [
        TransformersConfig.from_directory(tmp_path, use_generation_defaults=use)
        for use in (True, False)
    ]
    assert [each.generation_defaults for each in found] == [{"temperature": 0.25}, {}]
    assert found[0].eos_token_ids == found[1].eos_token_ids == (5, 3)


def test_names_are_a_tuple_and_the_first_is_the_models():
    assert EngineConfig(served_model_name="mia").served_model_name == ("mia",)
    several = EngineConfig(model="/some/path", served_model_name=["mia", "tim"])
    assert several.served_model_name == ("mia", "tim")
    assert several.model_name == "mia"
    assert several.with_overrides({"seed": 1}).served_model_name == ("mia", "tim")
    assert EngineConfig(model="/some/path").model_name == "/some/path"


async def test_everything_calls_the_model_by_its_served_name():
    engine = fake_engine("x", served_model_name=("mia", "tim"))
    assert repr(engine) == "<AsyncLLMEngine 'mia' new>"
    assert model_name(engine) == "mia"
    assert create_app(engine, model_names=["other"]).model_names == ("other",)
    metrics = EngineMetrics(engine)
    heard: list[Any] = []

    class Handler:
        def on_llm_end(self, response: Any, **_: Any) -> None:
            heard.append(response.llm_output["model_name"])

    async with app_client(engine, metrics=metrics) as client:
        models = (await client.get("/v1/models")).json()["data"]
        body = {"prompt": "Hi", "model": "tim"}
        answers = [
            await client.post("/v1/completions", json=each)
            for each in (body, {"prompt": "Hi"}, body | {"model": "asyncllm/demo"})
        ]
        await stream_with_callbacks(engine, "x", handlers=[Handler()]).result()
        assert 'model_name="mia"' in metrics.render().decode()
    assert [model["id"] for model in models] == ["mia", "tim"]
    assert [answer.status_code for answer in answers] == [200, 200, 404]
    assert [answer.json().get("model") for answer in answers] == ["tim", "mia", None]
    assert heard == ["mia"]


SHOUT = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"
HELLO = user("hé")


@pytest.mark.parametrize("kind", ["text", "str", "Path"])
async def test_a_template_in_place_of_the_models(kind, tmp_path):
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUT, encoding="utf-8")
    given: Any = {"text": SHOUT, "str": str(file), "Path": file}[kind]
    assert EngineConfig(chat_template=given).chat_template == (SHOUT if kind == "text" else file)
    expected = list("HÉ!".encode())
    async with app_client(fake_engine("x", chat_template=given)) as client:
        answer = await client.post("/tokenize", json={"messages": HELLO})
        assert answer.json()["tokens"] == expected
        chat = await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert chat.json()["usage"]["prompt_tokens"] == len(expected)
    with fake_llm("x", chat_template=given) as llm:
        assert list(llm.chat(HELLO).prompt_token_ids) == expected


async def test_a_template_of_a_model_that_is_loaded():
    async with AsyncLLMEngine(chat_template=SHOUT, **SMALL) as engine:
        done = await engine.chat(user("once"), max_tokens=1).result()
        assert engine.tokenizer.decode(done.prompt_token_ids) == "ONCE!"
        with pytest.raises(InvalidRequestError, match="the chat template takes none"):
            engine.chat(HELLO, tools=[TOOL])


async def test_wrong_template_is_reported_at_start(tmp_path):
    huge = tmp_path / "huge.jinja"
    huge.write_text("{{ 1 }}" * 30_000)
    for given, error, says in (
        ("{% if %}", InvalidRequestError, "chat_template: does not compile"),
        ("{{ 1 }}" * 30_000, InvalidRequestError, "expected at most 131072"),
        (huge, InvalidRequestError, "has 210000 characters, expected at most 131072"),
        ("no/such/file", ModelLoadError, "no/such/file: cannot be read"),
        (tmp_path, ModelLoadError, f"{tmp_path}: cannot be read"),
    ):
        with pytest.raises(error, match=says):
            await AsyncLLMEngine(chat_template=given, **SMALL).start()
        with pytest.raises(error, match=says):
            await fake_engine("x", chat_template=given).start()


async def test_a_template_for_one_call():
    expected = list("HÉ!".encode())
    async with app_client(fake_engine("x")) as client:
        engine = client._transport.app._server_context.engine
        for _ in range(2):
            done = await engine.chat(HELLO, chat_template=SHOUT).result()
            assert list(done.prompt_token_ids) == expected
        assert await engine.tokenize(HELLO, chat_template=SHOUT) == expected
        usual = await engine.tokenize(HELLO)
        assert await engine.tokenize(HELLO, chat_template="default") == usual != expected
        handled = stream_with_callbacks(engine, HELLO, chat_template=SHOUT)
        assert list((await handled.result()).prompt_token_ids) == expected
        for options, param, says in (
            ({"chat_template": "some/file.jinja"}, "chat_template", r"names? .*'default'"),
            ({"chat_template": 5}, "chat_template", "chat_template=5"),
            ({"chat_template": SHOUT, "tools": [TOOL]}, "tools", "the chat template takes none"),
            (
                {"chat_template": SHOUT, "chat_template_kwargs": {"chat_template": SHOUT}},
                "chat_template_kwargs",
                "no chat_template beside chat_template=",
            ),
        ):
            for call in (engine.chat, engine.tokenize):
                with pytest.raises(InvalidRequestError, match=says) as caught:
                    found = call(HELLO, **options)
                    await found
                assert caught.value.param == param
        with pytest.raises(InvalidRequestError, match=r"^chat_template=.*expected None"):
            await engine.tokenize("x", chat_template="{{ 1 }}")
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"messages": HELLO, "chat_template": SHOUT}
            error = (await client.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("unknown_parameter", "chat_template")
    with fake_llm("x") as llm:
        assert list(llm.chat(HELLO, chat_template=SHOUT).prompt_token_ids) == expected
        assert llm.tokenize(HELLO, chat_template=SHOUT) == expected


def test_only_the_last_templates_of_calls_are_kept_compiled():
    with fake_llm("x") as llm:
        template = llm.engine.tokenizer.chat_template
        for i in range(40):
            assert llm.tokenize(HELLO, chat_template=f"{i}{{{{ 'x' }}}}") == list(f"{i}x".encode())
        llm.tokenize(HELLO, chat_template="39{{ 'x' }}")
        found = template._compile_cached.cache_info()
        assert (found.currsize, found.hits, found.misses) == (8, 1, 40)
        assert len(template._compiled_templates) == 1


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def write(path: Path, values: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ({"max_position_embeddings": 64}, {"max_position_embeddings": 64}),
        ({"rope_scaling": YARN}, {"rope_scaling": YARN}),
        ({"torch_dtype": None, "unread": {"a": [1]}}, {"torch_dtype": None}),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, LLAMA),
    ],
)
@pytest.mark.parametrize("model_impl", ["native", "transformers", "auto"])
def test_an_override_is_read_as_if_the_file_had_it(tmp_path, overrides, changed, model_impl):
    plain, edited = write(tmp_path / "a", QWEN3), write(tmp_path / "b", QWEN3 | changed)
    found: Any = read_config(plain, model_impl, overrides=overrides)
    expected: Any = read_config(edited, model_impl)
    unchanged: Any = read_config(plain, model_impl)
    for name in ("architecture", "vocab_size", "max_position_embeddings", "eos_token_ids"):
        assert getattr(found, name) == getattr(expected, name)
    if model_impl == "transformers":
        ours, theirs, plains = (
            each.config.to_dict() | {"_name_or_path": "", "unread": None}
            for each in (found, expected, unchanged)
        )
        assert ours == theirs != plains
        assert found.model_class is expected.model_class
    else:
        assert replace(found, path=edited) == expected != replace(unchanged, path=edited)


def test_nested_configurations_are_merged():
    file = ConfigFile(
        Path("/m/config.json"),
        {
            "text_config": {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e4, "factor": 2}},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "vision_config": 5,
        },
    )
    found = file.with_overrides(
        {
            "text_config": {"rope_parameters": {"rope_theta": 1e6}, "new": 1},
            "rope_scaling": {"rope_type": "yarn"},
            "vision_config": {"a": 1},
        }
    )
    assert found.values == {
        "text_config": {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e6}, "new": 1},
        "rope_scaling": {"rope_type": "yarn"},
        "vision_config": {"a": 1},
    }
    assert file.values["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert file.with_overrides(None) is file.with_overrides({}) is file
    with pytest.raises(
        ModelLoadError, match=r"/m/config\.json with hf_overrides: vision_config is"
    ):
        found.integer("vision_config")
    for wrong in ({"quantization_config": None}, {"text_config": {"quantization_config": {}}}):
        with pytest.raises(InvalidRequestError, match="no quantization_config") as caught:
            file.with_overrides(wrong)
        assert caught.value.param == "hf_overrides"


async def test_a_model_computes_with_the_overrides(tmp_path):
    theta = {"rope_theta": 30.0, "rope_type": "default"}
    overrides = {"max_position_embeddings": 48, "rope_parameters": theta, "rope_theta": 30.0}
    edited = demo_with(tmp_path / "edited", "config.json", **overrides)
    prompt, options = "Once upon a time there was", {"temperature": 0, "max_tokens": 12}
    with LLM(edited, **SMALL) as llm, LLM(**SMALL) as plain:
        expected = llm.generate(prompt, ignore_eos=True, **options).token_ids
        assert plain.generate(prompt, ignore_eos=True, **options).token_ids != expected
    for model_impl in ("native", "transformers"):
        with LLM(hf_overrides=overrides, model_impl=model_impl, **SMALL) as llm:
            assert llm.engine.max_model_len == 48
            assert llm.generate(prompt, ignore_eos=True, **options).token_ids == expected
    async with AsyncLLMEngine(hf_overrides=overrides, **SMALL) as engine:
        done = await engine.generate(prompt, ignore_eos=True, **options)
        assert done.token_ids == expected
    with pytest.raises(ModelLoadError, match="hidden_size is 'wide'"):
        await AsyncLLMEngine(hf_overrides={"hidden_size": "wide"}, **SMALL).start()


def test_a_gguf_file_has_nothing_to_override(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(InvalidRequestError, match=r"^hf_overrides=.*a GGUF file has no") as caught:
        read_config(path, "auto", overrides={"rope_theta": 1.0})
    assert caught.value.param == "hf_overrides"


@pytest.mark.usefixtures("own_code")
def test_trusted_checkpoint_configuration_is_overridden(tmp_path):
    code = (
        "from transformers import PreTrainedConfig, Qwen3Config\n"
        "class Own(Qwen3Config):\n"
        "    model_type = 'own'\n"
    )
    values = QWEN3 | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    path = write(tmp_path / "own", values)
    (path / "own.py").write_text(code)
    file = ConfigFile.read(path / "config.json").with_overrides({"hidden_size": 32})
    found = _read_config(path, file, True, is_overridden=True)
    assert (type(found).__name__, found.hidden_size) == ("Own", 32)
    with pytest.raises(ModelLoadError, match="trust_remote_code=True runs that"):
        _read_config(path, file, False, is_overridden=True)
    known = ConfigFile(file.path, {**file.values, "model_type": "qwen3"})
    assert type(_read_config(path, known, False, is_overridden=True)).__name__ == "Qwen3Config"


@pytest.mark.parametrize("command", ["chat", "demo", "serve", "bench"])
def test_options_of_the_commands(command):
    given = ["--generation-config", "none", "--chat-template", "a.jinja"]
    given += ["--hf-overrides", '{"rope_theta": 1e6}']
    config = EngineConfig(**engine_options(parse([command, *given])))
    assert config.generation_config == "none"
    assert config.chat_template == Path("a.jinja")
    assert config.hf_overrides == {"rope_theta": 1e6}
    with pytest.raises(SystemExit):
        parse([command, "--hf-overrides", "{"])
