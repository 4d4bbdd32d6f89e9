"""The command line, between pipes and on a terminal."""

from __future__ import annotations

import io
import json
import random
import re
import signal
import subprocess
import sys

import pytest

from asyncllm.cli import main
from asyncllm.cli.conversation import Conversation
from asyncllm.cli.measure import percentile
from asyncllm.cli.text import format_rate, strip_control_characters
from asyncllm.cli.word_wrapper import WordWrapper
from asyncllm.gpu import calibration
from asyncllm.gpu.model_runner import ModelRunner
from tests.processes import hear_ctrl_c, python
from tests.slow import slow_but
from tests.terminal import QUICK, Terminal, asyncllm

# Random weights hardly ever say that they are done: an answer long enough to be interrupted.
ENDLESS = ("--load-format", "dummy", "--seed", "1", "--temperature", "1")


def is_plain(text: str) -> bool:
    return not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["chat", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    code = """
import sys
from asyncllm.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
heavy = {'torch', 'transformers', 'tokenizers', 'rich', 'asyncio'} & set(sys.modules)
assert not heavy, heavy
"""
    done = python("-c", code, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "asyncllm" in done.stdout


@pytest.mark.parametrize(
    ("redirected", "code", "says"),
    [
        ("<&- >&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "asyncllm: [Errno 28] No space left on device\n"),
    ],
)
def test_closed_or_full_standard_streams(redirected, code, says):
    """The command is that of a server's supervisor, or of a script on a full disk."""
    stand_in = (
        "import sys, types\n"
        "import asyncllm.cli, asyncllm.cli.arguments as arguments\n"
        "def run(_):\n"
        "    import os\n"
        "    assert not sys.stdin.isatty() and not sys.stdout.isatty()\n"
        "    print('x')\n"
        "    assert sys.stdin.read() == ''\n"
        "    assert os.open(os.devnull, 0) > 2\n"
        "    return 0\n"
        "sys.modules['asyncllm.cli.x'] = types.SimpleNamespace(run=run)\n"
        "arguments.parse = lambda argv: types.SimpleNamespace(command='x')\n"
        "sys.exit(asyncllm.cli.main())\n"
    )
    command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, stand_in]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (code, says)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--temperature", "-1"], "temperature=-1.0"),
        (["chat", "--top-p", "1.5"], "top_p=1.5"),
        (["demo", "--kv-cache-memory", "lots"], "kv_cache_memory='lots'"),
        (["demo", "--device", "abacus"], "device='abacus'"),
        (["bench", "--json", "/no/such/folder/file"], "--json /no/such/folder/file"),
    ],
)
def test_a_bad_value_is_named(arguments, named, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"asyncllm: {named}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sing"],
        ["demo", "--streams", "0"],
        ["bench", "--concurrency", "4,x"],
        ["bench", "--prompt-len", "ten"],
    ],
)
def test_a_command_line_that_cannot_be_read(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "chat", "bench"])
def test_missing_model(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"asyncllm: .*nothing: does not exist, expected .*\n", error)


def test_dead_engine_is_one_line(monkeypatch, capsys, small_bandwidth_probe):
    def launch(self, batch):
        raise ValueError("the device is on fire")

    monkeypatch.setattr(calibration, "calibrate_token_budget", lambda time_step: 64)
    monkeypatch.setattr(calibration, "find_min_async_tokens", lambda time_step, most, known: None)
    monkeypatch.setattr(ModelRunner, "launch", launch)
    assert main(["bench", *QUICK]) == 1
    died = "asyncllm: the engine died: ValueError: the device is on fire\n"
    assert capsys.readouterr().err == died


def test_text_from_a_model_cannot_control_the_terminal():
    assert strip_control_characters("a\x1b[2Jb\x07\tc\r\nd\x9be") == "a[2Jb c\nde"
    assert strip_control_characters("häß 日本 🙂\n") == "häß 日本 🙂\n"


def test_percentile_and_rate():
    values = list(range(100, 0, -1))
    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.99) == 100
    assert percentile(values, 0.0) == 1
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None
    assert (format_rate(30, 0.5), format_rate(30, 0.0)) == ("60 tok/s", "–")


def test_flow_breaks_lines_between_words():
    text = "One two three four.\n\n  indented line of several words\nend"
    whole: set[str] = set()
    rng = random.Random(11)
    for _ in range(50):
        out = io.StringIO()
        flow = WordWrapper(out, width=16)
        rest = text
        while rest:
            cut = rng.randint(1, 6)
            flow.write(rest[:cut])
            rest = rest[cut:]
        flow.finish()
        whole.add(out.getvalue())
    assert len(whole) == 1
    lines = whole.pop().split("\n")
    assert max(map(len, lines)) <= 16
    assert lines[:3] == ["  One two three", "  four.", ""]
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


def test_flow_puts_too_long_words_on_their_own_line():
    out = io.StringIO()
    flow = WordWrapper(out, width=10)
    flow.write("an incomprehensible word")
    flow.finish()
    assert out.getvalue() == "  an\n  incomprehensible\n  word\n"


def test_conversation_forgets_whole_turns(tmp_path):
    conversation = Conversation("Be brief.")
    for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")):
        conversation.add_message(role, text)
    conversation.add_message("user", "5")
    assert conversation.turn_starts() == [0, 2, 4]
    assert [m["content"] for m in conversation.messages_to_send(2)] == ["Be brief.", "3", "4", "5"]
    conversation.messages.pop()
    del conversation.messages[:2]
    assert [m["content"] for m in conversation.messages_to_send()] == ["Be brief.", "3", "4"]
    conversation.save(tmp_path / "saved.json")
    saved = json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))
    assert saved == conversation.messages_to_send()


@pytest.mark.slow
def test_demo_into_a_pipe():
    done = asyncllm("demo", "--streams", "9", "--seed", "3", "--max-tokens", "32")
    assert (done.returncode, done.stderr) == (0, "")
    assert is_plain(done.stdout)
    headings = re.findall(r"^\[(\d+)\] [\w ]+: .+\n(?:    .*\n)+", done.stdout, re.MULTILINE)
    assert sorted(map(int, headings)) == list(range(1, 10))
    figures = re.findall(r"^    \(\d+ tokens, first after .*, .*, (\w+)\)$", done.stdout, re.M)
    assert len(figures) == 9
    assert set(figures) <= {"stop", "length"}
    assert re.search(r"^9 streams, \d+ tokens in .* prefix cache$", done.stdout, re.M)


def demo(*options: str, **more) -> subprocess.Popen[str]:
    """A demo between pipes that has written its first line."""
    child = subprocess.Popen(
        [sys.executable, "-m", "asyncllm", "demo", *options, *QUICK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )
    child.stdout.readline()
    return child


@pytest.mark.slow
def test_demo_whose_reader_leaves():
    with demo("--streams", "4", "--max-tokens", "8") as child:
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(60) == 1


@pytest.mark.slow
def test_interrupted_demo():
    with demo(*ENDLESS, preexec_fn=hear_ctrl_c) as child:
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == ""
        assert child.wait(60) == 130


def test_bench_writes_printed_figures(tmp_path, capsys, small_bandwidth_probe):
    file = tmp_path / "bench.json"
    options = ("--concurrency", "2,1", "--prompt-len", "9", "--output-len", "20", "--rounds", "2")
    assert main(["bench", *options, "--json", str(file), *QUICK]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    assert is_plain(done.out)
    assert "streams  tok/s" in done.out
    result = json.loads(file.read_text(encoding="utf-8"))
    assert set(result) == {"machine", "command", "config", "execution", "rows"}
    assert result["execution"]["weight_bytes"] > 6_000_000  # 1.7 million parameters of 4 bytes
    assert {"processor", "python", "torch", "asyncllm"} <= set(result["machine"])
    assert [row["concurrency"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["requests"] == 2 * row["concurrency"]
        assert row["output_tokens"] == 20 * row["requests"]
        for name in ("ttft", "between_tokens", "loop_lag", "cancel_to_free"):
            assert 0 <= row[f"{name}_p50"] <= row[f"{name}_p99"]
        execution = result["execution"]
        read = execution["weight_bytes"] + row["concurrency"] * 19 * execution["kv_bytes_per_token"]
        assert row["step_floor"] == pytest.approx(read / execution["memory_bandwidth"])


@pytest.mark.slow
def test_bench_says_which_path_runs_and_why():
    done = asyncllm("bench", "--env")
    assert (done.returncode, done.stderr) == (0, "")
    machine, path, traffic = done.stdout.splitlines()
    assert "torch" in machine
    assert re.fullmatch(
        r"ops (native \(\w+\)|onednn|cpu), attention \w+, float32 on cpu on 1 thread: .+", path
    )
    assert re.fullmatch(
        r"a step reads \S+ MB of weights, and \S+ kB for each token of its sequences; its threads "
        r"read \S+ GB/s",
        traffic,
    )


@pytest.mark.slow
def test_bench_past_the_context_is_refused():
    done = asyncllm("bench", "--prompt-len", "500")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "asyncllm: --prompt-len 500 --output-len 64: 564 tokens, "
        "expected at most the context of 512\n"
    )


@pytest.mark.slow
def test_piped_chat_drops_messages_past_the_context():
    turns = "".join(f"Mia has {i} red hats and a boat.\n" for i in range(4))
    done = asyncllm("chat", "--max-model-len", "80", "--max-tokens", "12", stdin=turns)
    assert done.returncode == 0
    assert is_plain(done.stdout)
    assert done.stdout.count("\n") >= 4
    forgotten = "The context is full: the oldest messages were forgotten."
    assert set(done.stderr.splitlines()) == {forgotten}


def pipe(monkeypatch: pytest.MonkeyPatch, stdin: bytes, encoding: str = "utf-8") -> io.BytesIO:
    """Bytes for a command to read, and those that it writes."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding, write_through=True))
    return out


@pytest.mark.parametrize("room", [("--max-model-len", "80"), ("--kv-cache-memory", "800KiB")])
def test_too_long_message_keeps_the_history(room, tmp_path, monkeypatch, capsys):
    """Not one that is refused when it is sent, nor one that a worker thread has to tokenise."""
    long = ["Mia has a boat. " * 40, "Mia has a boat. " * 400]
    turns = ["My name is Lena.", *long, "I am 5.", f"/save {tmp_path}/saved.json"]
    out = pipe(monkeypatch, "\n".join(turns).encode())
    assert main(["chat", *room, "--max-tokens", "8", *QUICK]) == 1
    assert out.getvalue().count(b"\n") == 2
    *refused, saved = capsys.readouterr().err.splitlines()
    assert len(refused) == 2
    too_long = re.compile(r"asyncllm: (prompt: has|messages: ).* tokens, .*")
    assert all(map(too_long.fullmatch, refused))
    assert saved == f"Saved 4 messages to {tmp_path}/saved.json."
    said = json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))
    assert [m["content"] for m in said if m["role"] == "user"] == ["My name is Lena.", "I am 5."]


def test_commands_through_a_pipe(tmp_path, monkeypatch, capsys):
    file = tmp_path / "saved.json"
    lines = (
        *("/help", "My name is Lena.", "/reset", "/system Be brief.", "What is \\", "my name?"),
        *(f"/save {file}", "/usr/bin is a path.", "/exit", "Never sent."),
    )
    out = pipe(monkeypatch, "\n".join(lines).encode())
    assert main(["chat", "--max-tokens", "8", *QUICK]) == 0
    assert out.getvalue().count(b"\n") == 3
    assert "/help    what there is" in capsys.readouterr().err
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert [m["content"] for m in saved[:2]] == ["Be brief.", "What is \nmy name?"]


@pytest.mark.parametrize(
    "bad", slow_but([b"/dance", b"/save", b"/save /no/such/folder/file"], b"/dance")
)
def test_failed_command_in_a_pipe_sets_the_exit_code(bad, monkeypatch, capsys):
    out = pipe(monkeypatch, bad + b"\n/exit\n")
    assert main(["chat", *QUICK]) == 1
    assert out.getvalue() == b""
    assert capsys.readouterr().err.startswith(bad.decode().split()[0])


@pytest.mark.parametrize("encoding", slow_but(["ascii", "utf-8"], "ascii"))
def test_characters_that_an_encoding_lacks(encoding, monkeypatch, capsys, small_bandwidth_probe):
    out = pipe(monkeypatch, b"h\xe4\xff \\", encoding)
    assert main(["chat", "--max-tokens", "4", *QUICK]) == 0
    assert out.getvalue().endswith(b"\n")
    out = pipe(monkeypatch, b"", encoding)
    assert main(["bench", "--concurrency", "1", "--output-len", "2", *QUICK]) == 0
    rule = "─" if encoding == "utf-8" else "?"
    assert rule * 7 in out.getvalue().decode(encoding)
    assert capsys.readouterr().err == ""


def test_demo_on_a_terminal():
    with Terminal("demo", "--streams", "12", "--max-tokens", "24") as terminal:
        assert terminal.wait_for_exit() == 0
        assert "12 streams on one event loop" in terminal.text
        assert re.search(r"12 streams, \d+ tokens in ", terminal.text)
        assert terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l")
        assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_interrupted_bench_takes_its_progress_back():
    with Terminal("bench", "--concurrency", "32") as terminal:
        terminal.wait_for("32 streams …")
        assert terminal.interrupt_until_exit() == 130
        assert terminal.raw.endswith("\r\x1b[2K")


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path):
    with Terminal("chat", *ENDLESS) as terminal:
        terminal.wait_for("/help lists commands")
        terminal.wait_for("› ")
        terminal.type("Tell me a story.\n")
        terminal.wait_for("Tell me a story.")
        written = len(terminal.text)
        while len(terminal.text) < written + 40:
            terminal.wait_for(terminal.text[-1:], times=terminal.text.count(terminal.text[-1]) + 1)
        assert not terminal.echoes()
        terminal.type("\x03")
        terminal.wait_for(", stopped")
        terminal.wait_for("› ", times=2)
        terminal.type(f"/save {tmp_path}/saved.json\n")
        terminal.wait_for("Saved 2 messages")
        terminal.type("/dance\n")
        terminal.wait_for("/dance: no such command")
        terminal.wait_for("› ", times=4)
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.interrupt_until("Ctrl-C again, or Ctrl-D, leaves.")
        terminal.wait_for("› ", times=5)
        assert terminal.interrupt_until_exit() == 0
        assert "Traceback" not in terminal.text
    saved = json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))
    assert [message["role"] for message in saved] == ["user", "assistant"]


@pytest.mark.slow
def test_chat_remembers_and_takes_a_paste_as_one_message():
    with Terminal("chat", "--temperature", "0", "--max-tokens", "16") as terminal:
        terminal.wait_for("› ")
        terminal.type("My name is Lena.\n")
        terminal.wait_for(" tokens", times=1)
        terminal.wait_for("› ", times=2)
        terminal.type("\x1b[200~What is\nmy name?\x1b[201~")
        terminal.wait_for("my name?")
        terminal.type("\n")
        terminal.wait_for(" tokens", times=2)
        terminal.wait_for("› ", times=3)
        terminal.type("\x04")
        assert terminal.wait_for_exit() == 0
        assert terminal.text.count("first token") == 2
