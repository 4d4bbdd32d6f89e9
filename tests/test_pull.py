"""One GGUF file of a repository by its quantisation, and ``asyncllm pull``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.checkpoint.gguf_choice import choose_gguf
from asyncllm.checkpoint.model_files import resolve_model, resolve_tokenizer
from asyncllm.errors import ModelLoadError
from tests.checkpoints import make_checkpoint
from tests.hub_stand_in import HubStandIn, serve_hub
from tests.processes import hear_ctrl_c

hub = pytest.fixture(serve_hub)

GGUF = b"GGUF" + bytes(range(256)) * 4096
FILES = {
    "README.md": b"#",
    "config.json": b"{}",
    "Toy-0.6B-Q4_K_M.gguf": GGUF,
    "Toy-0.6B-Q4_K_S.gguf": GGUF[:-1],
    "Toy-0.6B-UD-Q4_K_XL.gguf": GGUF[:-2],
    "Toy-0.6B-UD-Q2_K.gguf": GGUF[:-3],
    "toy-0.6b.q8_0.gguf": GGUF[:-4],
    "BF16/Toy-0.6B-BF16-00001-of-00002.gguf": GGUF[:-5],
    "BF16/Toy-0.6B-BF16-00002-of-00002.gguf": GGUF[:-6],
    "mmproj-BF16.gguf": b"GGUF",
}


@pytest.fixture
def resolve(hub: HubStandIn, tmp_path: Path) -> Callable[..., Path]:
    hub.repositories["org/toy-GGUF"] = FILES
    return partial(resolve_model, endpoint=hub.endpoint, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ("Q4_K_M", "Toy-0.6B-Q4_K_M.gguf"),
        ("q4-k-m", "Toy-0.6B-Q4_K_M.gguf"),
        ("UD-Q4_K_XL", "Toy-0.6B-UD-Q4_K_XL.gguf"),
        ("Q8_0", "toy-0.6b.q8_0.gguf"),
        ("bf16", "BF16/Toy-0.6B-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_quantisation_names_one_file_or_all_its_parts(resolve, hub, quantization, name):
    path = resolve(f"org/toy-GGUF:{quantization}")
    assert path.read_bytes() == FILES[name]
    assert path.as_posix().endswith(f"/{name}")
    fetched = {r.split("/resolve/")[1][41:] for r in hub.requests if r.startswith("GET /org")}
    both = {name, name.replace("00001-of", "00002-of")}
    assert fetched == both


@pytest.mark.parametrize("quantization", ["Q4_K", "Q4_K_XL", "Q2_K", "Q4", "K_M", "Q5_K_M"])
def test_no_quantisation_is_taken_for_another(resolve, quantization):
    wanted = {"K_M": "Toy-0.6B-Q4_K_M.gguf"}.get(quantization)
    if wanted:
        assert choose_gguf(FILES, quantization, "x") == [wanted]
        return
    with pytest.raises(ModelLoadError) as caught:
        resolve(f"org/toy-GGUF:{quantization}")
    message = str(caught.value)
    assert f"model='org/toy-GGUF': no GGUF file is {quantization}, expected one of: " in message
    for name in FILES:
        is_listed = name.endswith(".gguf") and "mmproj" not in name and "00002-of" not in name
        assert (name.split("/")[-1] in message) == is_listed
    assert "config.json" not in message


def test_a_tie_and_a_missing_choice_name_the_files(resolve, hub):
    hub.repositories["org/tie"] = {"a-Q4_0.gguf": GGUF, "b-Q4_0.gguf": GGUF, "c-Q8_0.gguf": GGUF}
    with pytest.raises(ModelLoadError) as caught:
        resolve("org/tie:Q4_0")
    assert str(caught.value) == (
        "model='org/tie': several GGUF files are Q4_0, name one of them behind the colon: "
        "a-Q4_0.gguf, b-Q4_0.gguf"
    )
    with pytest.raises(
        ModelLoadError, match=r"several GGUF files, name one of them behind a colon: a-Q4_0\.gguf"
    ):
        resolve("org/tie")
    hub.repositories["org/one"] = {"README.md": b"#", "only-Q8_0.gguf": GGUF}
    assert resolve("org/one").name == "only-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match=r"org/model': has no GGUF file"):
        resolve("org/model:Q4_K_M")
    many = [f"{'x' * 200}{i}-Q4_0.gguf" for i in range(1000)]
    with pytest.raises(ModelLoadError, match=r"and 984 more$") as caught:
        choose_gguf(many, "Q8_0", "where")
    assert len(str(caught.value)) < 2000


def test_a_split_file_needs_all_its_parts():
    parts = [f"a-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert choose_gguf(reversed(parts), "Q8_0", "x") == parts
    with pytest.raises(ModelLoadError, match=r"x: .*1 of its 3 parts are missing: "):
        choose_gguf([parts[0], parts[2]], "Q8_0", "x")


def test_file_path_resolves_ambiguous_quantisation():
    names = ["a/M-Q4_K_M.gguf", "b/M-Q4_K_M.gguf", "BF16/M-Q8_0.gguf", "M-mmproj-F16.gguf"]
    with pytest.raises(ModelLoadError, match=r"behind the colon: a/M-Q4_K_M\.gguf, b/M-Q4_K_M"):
        choose_gguf(names, "Q4_K_M", "x")
    assert choose_gguf(names, "b/M-Q4_K_M.gguf", "x") == ["b/M-Q4_K_M.gguf"]
    with pytest.raises(ModelLoadError, match="no GGUF file is BF16"):
        choose_gguf(names, "BF16", "x")
    with pytest.raises(ModelLoadError, match="no GGUF file is F16"):
        choose_gguf(names, "F16", "x")


def test_revisions_and_the_cache(resolve, hub, tmp_path):
    path = resolve("org/toy-GGUF:Q8_0", "v1")
    assert "2" * 40 in path.parts
    with pytest.raises(ModelLoadError, match="no revision 'v9'"):
        resolve("org/toy-GGUF:Q8_0", "v9")
    with pytest.raises(ModelLoadError, match="no such model on the hub"):
        resolve("org/absent:Q8_0")
    offline = partial(resolve, endpoint="http://127.0.0.1:9")
    assert offline("org/toy-GGUF:Q8_0", "v1") == path
    with pytest.raises(ModelLoadError, match=r"no GGUF file is Q4_K_M, expected one of: toy-0\.6b"):
        offline("org/toy-GGUF:Q4_K_M", "v1")
    with pytest.raises(ModelLoadError, match="not in the cache"):
        offline("org/toy-GGUF:Q8_0")
    tokenizer = resolve_tokenizer(
        "org/toy-GGUF:Q8_0", "v1", endpoint=hub.endpoint, cache_dir=tmp_path / "cache"
    )
    assert tokenizer == path


def test_local_names_with_a_colon_are_paths(resolve, hub, tmp_path, monkeypatch):
    folder = tmp_path / "org" / "toy:Q4_K_M"
    folder.mkdir(parents=True)
    (folder / "x.gguf").write_bytes(GGUF)
    (tmp_path / "a:b.gguf").write_bytes(GGUF)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/toy:Q4_K_M") == Path("org/toy:Q4_K_M/x.gguf")
    assert resolve("a:b.gguf") == Path("a:b.gguf")
    local = tmp_path / "local" / "files"
    local.mkdir(parents=True)
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (local / name).write_bytes(GGUF)
    assert resolve("local/files:q8_0") == Path("local/files/m-Q8_0.gguf")
    with pytest.raises(ModelLoadError, match="has no revisions"):
        resolve("local/files:q8_0", "v1")
    for drive in (r"C:\models\toy", "C:toy", "C:/toy"):
        with pytest.raises(ModelLoadError, match="neither a directory nor a valid hub id"):
            resolve(drive)
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve("./absent:Q4_K_M")
    assert not [r for r in hub.requests if "/resolve/" in r]


def test_a_full_disk_is_told_before_the_download(resolve, hub, monkeypatch):
    sizes: list[int] = []
    usage = SimpleNamespace(free=len(GGUF) - 5)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ModelLoadError) as caught:
        resolve("org/toy-GGUF:Q4_K_M", announce=sizes.append)
    assert f"has {len(GGUF)} bytes, and" in str(caught.value)
    assert f"has {len(GGUF) - 5} free" in str(caught.value)
    assert not sizes
    assert not [r for r in hub.requests if r.startswith("GET /org")]
    usage.free = len(GGUF)
    path = resolve("org/toy-GGUF:Q4_K_M", announce=sizes.append)
    assert resolve("org/toy-GGUF:Q4_K_M", announce=sizes.append) == path
    assert sizes == [len(GGUF)]


def test_a_cut_download_resumes(resolve, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    hub.cuts = 1
    assert resolve("org/toy-GGUF:Q4_K_M").read_bytes() == GGUF
    assert f"RANGE {2**19}" in hub.requests


def test_short_download_is_discarded(resolve, hub, tmp_path):
    hub.missing_bytes = 7
    with pytest.raises(ModelLoadError, match=r"org/toy-GGUF'.*download failed.*Consistency"):
        resolve("org/toy-GGUF:Q4_K_M")
    assert list((tmp_path / "cache").rglob("*.gguf")) == []
    with pytest.raises(ModelLoadError):
        resolve("org/toy-GGUF:Q4_K_M", endpoint="http://127.0.0.1:9")
    hub.missing_bytes = 0
    assert resolve("org/toy-GGUF:Q4_K_M").read_bytes() == GGUF


def test_an_engine_downloads_and_reads_the_file(hub, resolve, tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
    from tests.gguf_files import write_gguf

    make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    local = tmp_path / "toy-F32.gguf"
    write_gguf(local, tmp_path, load_file(tmp_path / "model.safetensors"), "F32")
    hub.repositories["org/real"] = {"toy-F32.gguf": local.read_bytes(), "toy-Q8_0.gguf": GGUF}
    monkeypatch.setattr("asyncllm.checkpoint.model_files.resolve_model", resolve)
    hub.hold.clear()

    async def generate(model: str) -> tuple[list[str], list[int]]:
        engine = AsyncLLMEngine(model, device="cpu")
        starting = asyncio.create_task(engine.start())
        stages = []
        while not starting.done():
            if engine.load_progress[1] and engine.load_stage not in stages:
                stages.append(engine.load_stage)
                hub.hold.set()
            await asyncio.sleep(0.001)
        await starting
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        result = await engine.generate([1, 2, 3], params)
        await engine.aclose()
        return stages, list(result.token_ids)

    stages, tokens = asyncio.run(generate("org/real:F32"))
    assert stages[0] == "download"
    assert set(stages) <= {"download", "weights"}
    assert tokens == asyncio.run(generate(str(local)))[1]
    assert len(tokens) == 5


def start_pull(hub: HubStandIn, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "asyncllm", "pull", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )


def wait_for_download(hub: HubStandIn) -> None:
    end = time.monotonic() + 30
    while not any(r.startswith("GET /org") and "gguf" in r for r in hub.requests):
        assert time.monotonic() < end, hub.requests
        time.sleep(0.02)


def test_pull_in_two_processes_and_after_ctrl_c(hub, tmp_path):
    hub.repositories["org/toy-GGUF"] = FILES
    hub.hold.clear()
    cache = tmp_path / "cache"
    stopped = start_pull(hub, cache, "org/toy-GGUF:Q4_K_M")
    wait_for_download(hub)
    time.sleep(0.3)
    stopped.send_signal(signal.SIGINT)
    time.sleep(0.3)
    hub.hold.set()
    output, errors = stopped.communicate(timeout=30)
    assert (stopped.returncode, output) == (130, "")
    assert errors == f"org/toy-GGUF:Q4_K_M: {len(GGUF) / 1e6:.3g} MB to download\n"
    assert list(cache.rglob("*.gguf")) == []
    assert list(cache.rglob("*.incomplete")) == []
    both = [start_pull(hub, cache, "org/toy-GGUF:Q4_K_M") for _ in range(2)]
    for process in both:
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert Path(output.strip()).read_bytes() == GGUF
    hub.requests.clear()
    again = start_pull(hub, cache, "org/toy-GGUF:Q4_K_M", "--revision", "main")
    assert again.communicate(timeout=30) == (output, "")
    absent = start_pull(hub, cache, "org/toy-GGUF:Q5_0")
    message = absent.communicate(timeout=30)[1]
    assert absent.returncode == 1
    assert message.startswith("asyncllm: model='org/toy-GGUF': no GGUF file is Q5_0, expected one")
    assert not [r for r in hub.requests if r.startswith("GET /org")]
