"""The library of native ops: attention against a plain model, threads, refusals, the build."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm import AsyncLLMEngine
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_attention import NativeAttention
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import quantise_int4, quantise_int8
from asyncllm.gpu.threads import available_cpus
from asyncllm.native.build import (
    COMPILER_FLAGS,
    ISA_FLAGS,
    LIBRARY_PATH,
    SOURCE_DIRECTORY,
    BuildError,
    build,
    find_compiler,
)
from asyncllm.native.shared_library import Library, NativeUnavailableError
from tests.native_library import (
    ISAS,
    OTHER_LIBRARY,
    build_emulated,
    check_forked_child,
    compiler,
    context,
    each_isa,
    link,
    needs_native,
    run_fuzz,
)
from tests.step_inputs import planned
from tests.triton.paged import AttentionCase, attend, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Sequences:
    """Sequences in a paged cache whose other slots are NaN, and queries of all of their tokens."""

    def __init__(self, lengths, shape, dtype, block_size, seed):
        self.shape, self.block_size = shape, block_size
        sizes, every = (shape.group_size, shape.head_dim), tuple(lengths)
        case = AttentionCase(
            "every token", *sizes, every, every, shape.num_kv_heads, block_size, dtype,
            layout="blocks",
        )  # fmt: skip
        batch = make_batch(case, "cpu", seed)
        self.cache, self.table = batch.cache, batch.block_table.numpy()
        self.queries, self.keys, self.values = batch.q, batch.keys, batch.values
        self.firsts = batch.query_start_loc.numpy()

    def inputs(self, rows, starts, ends):
        """The step that computes tokens ``starts`` to ``ends`` of ``rows``, and its queries."""
        starts, ends = np.array(starts), np.array(ends)
        spans = [
            self.queries[self.firsts[row] + start : self.firsts[row] + end]
            for row, start, end in zip(rows, starts, ends, strict=True)
        ]
        table = np.ascontiguousarray(self.table[rows], dtype=np.int32)
        inputs = planned(table, np.arange(len(rows)), starts, ends - starts, self.block_size)
        return inputs, torch.cat(spans)

    def run(self, attention, rows, starts, ends, window=None, sinks=None):
        inputs, q = self.inputs(rows, starts, ends)
        return attention(q, q, q, self.cache, attention.plan(inputs, window, 0), sinks)

    def expected(self, row, start, end, window, sinks):
        first, shape = self.firsts[row], self.shape
        q, kv = self.queries[first + start : first + end], (self.keys[row], self.values[row])
        keys, values = (x[:end] for x in kv)
        found = attend(q, keys, values, shape.scale, shape.softcap, window, sinks)
        return found.flatten(1)


@st.composite
def steps(draw):
    longest = draw(st.sampled_from([5, 40, 600, 1100]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    counts = [draw(st.one_of(st.just(1), st.integers(1, length))) for length in lengths]
    heads = draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([1, 7, 16, 64, 80, 128, 512] if longest < 100 else [8, 20]))
    group = draw(st.sampled_from([1, 2, 5, 33]))
    softcap = draw(st.sampled_from([None, 1.5]))
    shape = AttentionShape(heads * group, heads, head_dim, head_dim**-0.5, softcap)
    return (
        (lengths, counts, shape, draw(st.sampled_from(list(TOLERANCE)))),
        draw(st.sampled_from([1, 3, 16, 32])),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from([None, 1, 9, 300])),
        draw(st.booleans()),
    )


@each_isa
@settings(max_examples=30)
@given(step=steps())
def test_attention_is_that_of_a_plain_model(isa, step):
    (lengths, counts, shape, dtype), block_size, seed, window, sinking = step
    sequences = Sequences(lengths, shape, dtype, block_size, seed)
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(shape.num_heads, generator=generator) if sinking else None
    attention = NativeAttention(context(2, isa), shape, dtype)
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    found = sequences.run(attention, list(range(len(lengths))), starts, lengths, window, sinks)
    wanted = torch.cat(
        [
            sequences.expected(row, start, length, window, sinks)
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
    )
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


@each_isa
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_attends_alike_in_any_chunk_and_company(isa, dtype, window):
    """Bit by bit: alone, among others, in a chunk of any size, on any number of threads."""
    shape = AttentionShape(6, 2, 40, 40**-0.5, softcap=20.0 if window else None)
    lengths = [1100, 3, 37, 700]
    sequences = Sequences(lengths, shape, dtype, 16, seed=5)
    attention = NativeAttention(context(1, isa), shape, dtype)
    threaded = NativeAttention(context(3, isa), shape, dtype)
    rows = list(range(4))
    whole = sequences.run(threaded, rows, [0] * 4, lengths, window)
    for row, length in enumerate(lengths):
        first = int(sequences.firsts[row])
        mine = whole[first : first + length]
        for chunk in (1, 7, 64) if length < 100 else (333,):
            for start in range(0, length, chunk):
                end = min(start + chunk, length)
                alone = sequences.run(attention, [row], [start], [end], window)
                assert torch.equal(alone, mine[start:end]), (row, start, chunk)
    ends = [1000, 2, 30, 650]
    decodes = sequences.run(threaded, rows, [end - 1 for end in ends], ends, window)
    for row, end in enumerate(ends):
        assert torch.equal(decodes[row], whole[int(sequences.firsts[row]) + end - 1])


@each_isa
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("convert", [lambda weights: weights, quantise_int8, quantise_int4])
def test_a_row_of_a_linear_layer_is_its_own(isa, dtype, convert):
    generator = torch.Generator().manual_seed(6)
    inputs = 258 if convert is quantise_int4 else 257
    weight = torch.randn(331, inputs, generator=generator)
    bias = torch.randn(331, generator=generator)
    bundle = convert(LinearWeights(weight.to(dtype), bias.to(dtype)))
    linear = NativeOps(context(1, isa)).linear(bundle)
    threaded = NativeOps(context(3, isa)).linear(bundle)
    x = torch.randn(200, inputs, generator=generator).to(dtype)
    whole = linear(x)
    for rows in (*range(1, 20), 95, 200):
        for layer in (linear, threaded):
            assert torch.equal(layer(x[:rows]), whole[:rows])
            assert torch.equal(layer(x[-rows:]), whole[-rows:])


def own_threads() -> list[int]:
    """The native threads of this process."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith("asyncllm-op"):
                found.append(int(task.name))
    return found


def test_threads_end_with_the_last_reference():
    before = len(own_threads())
    ops = NativeOps(context(4))
    assert len(own_threads()) == before + 3
    linear = ops.linear(LinearWeights(torch.eye(600)))
    del ops
    x = torch.randn(50, 600)
    assert torch.equal(linear(x), x)
    del linear
    assert len(own_threads()) == before


def test_pools_of_one_process_do_not_meet():
    weight = torch.randn(512, 300, generator=torch.Generator().manual_seed(7))
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(8))
    expected = NativeOps(context(1)).linear(LinearWeights(weight))(x)
    wrong: list[int] = []

    def work():
        linear = NativeOps(context(3)).linear(LinearWeights(weight))
        for turn in range(300):
            if not torch.equal(linear(x[: 1 + turn % 64]), expected[: 1 + turn % 64]):
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    ops = NativeOps(context(3))
    linear = ops.linear(LinearWeights(torch.eye(600)))
    x = torch.randn(50, 600)
    linear(x)
    # The child's threads are the parent's: there is nothing to end.
    check_forked_child(lambda: linear(x), ops.context._finalizer)
    assert torch.equal(linear(x), x)


def test_attention_over_invalid_cache_is_refused():
    shape = AttentionShape(4, 2, 8, 1.0)
    attention = NativeAttention(context(2), shape, torch.float32)
    sequences = Sequences([5, 9], shape, torch.float32, 4, seed=1)
    inputs, q = sequences.inputs([0, 1], [4, 8], [5, 9])

    def run(lengths=(5, 9), q=q, cache=sequences.cache):
        host = replace(inputs.host, seq_lens=np.array(lengths, np.int32))
        return attention(q, q, q, cache, attention.plan(replace(inputs, host=host), None, 0))

    for block in (-1, sequences.cache.shape[1]):
        inputs.groups[0].host_table[1, 2] = block
        with pytest.raises(RuntimeError, match="attention: a slot, block or position"):
            run()
    inputs.groups[0].host_table[1, 2] = 1
    with pytest.raises(RuntimeError, match="beyond its table"):
        run((5, 21))
    assert not run((0, 9))[0].any()
    for wrong in (q[:1], q[..., :4], q.double()):
        with pytest.raises(ValueError, match=r"q is .*expected \(2, 4, 8\) of torch.float32"):
            run(q=wrong)
    for cache in (sequences.cache[..., :1, :], sequences.cache.transpose(3, 4)):
        with pytest.raises(ValueError, match="a KV cache"):
            run(cache=cache)


def test_inputs_without_an_op_are_refused():
    ops = NativeOps(context(2))
    rope = ops.rope_and_cache(AttentionShape(4, 2, 8, 1.0), None, None, 1e-6)
    table, cache = torch.randn(10, 8), torch.zeros(2, 3, 4, 2, 8)
    qkv, slots = torch.randn(1, 64), torch.tensor([3])
    for positions, wrong in ((10, 3), (-1, 3), (0, 12), (0, -1)):
        with pytest.raises(RuntimeError, match="rope_and_cache: a slot, block or position"):
            rope(qkv, (table, torch.tensor([positions])), cache, torch.tensor([wrong]))
    with pytest.raises(ValueError, match="slots are not 1 contiguous int64"):
        rope(qkv, (table, torch.tensor([0])), cache, slots.int())
    assert not cache.any()
    linear = ops.linear(LinearWeights(torch.randn(6, 8)))
    for wrong, words in (
        (torch.randn(2, 7), r"x is \(2, 7\), expected \(2, 8\)"),
        (torch.randn(2, 8).half(), "float16"),
    ):
        with pytest.raises(ValueError, match=words):
            linear(wrong)


def test_strided_rows_are_copied_or_read_where_they_are():
    generator = torch.Generator().manual_seed(10)
    weight = torch.randn(40, 30, generator=generator)
    ops = NativeOps(context(1))
    x = torch.randn(7, 30, generator=generator)
    wide = torch.cat((x, x), 1)
    linear = ops.linear(LinearWeights(weight))
    assert torch.equal(linear(wide[:, 30:]), linear(x))
    assert torch.equal(linear(x.T.contiguous().T), linear(x))
    assert torch.equal(ops.linear(LinearWeights(weight.T.contiguous().T))(x), linear(x))
    raw = torch.zeros(4 * 60 + 1, dtype=torch.uint8)
    library, handle = ops.context.functions, ops.context.handle
    odd, at = raw.data_ptr() + 1, raw.data_ptr()
    up = at + 120
    for gate, stride, up_at, up_stride, rows, activation, dtype in (
        (odd, 60, up, 60, 1, 0, 0),
        (at, 60, odd, 60, 1, 0, 0),
        (at, 29, up, 60, 2, 0, 0),
        (at, 60, up, 29, 2, 0, 0),
        (at, 60, up, 60, 1, 0, 7),
        (at, 60, up, 60, 1, 2, 0),
    ):
        given = gate, stride, up_at, up_stride, at, rows, 30, activation, dtype
        assert library.gated_mul(handle, *given) == 1
    assert library.softcap(handle, at, 60, 0.0, 1, 60, 0) == 1
    assert library.add(handle, odd, 60, at, 60, 1.0, 1.0, 1, 60, 0) == 1
    assert library.rms_norm(handle, at, 60, None, 0, at, 1, 1e-6, 1.0, 1.0, at, 1, 60, 0) == 1
    assert not library.pack(handle, odd, 0, 2, 15, 15, None, None)
    assert not library.pack(handle, at, 3, 2, 15, 15, None, None), "8 bits and no scales"


def test_nan_stays_nan():
    """A broken model is noticed by its logits."""
    shape = AttentionShape(2, 1, 16, 0.25)
    for isa in ISAS:
        ops = NativeOps(context(1, isa))
        x = torch.randn(3, 32)
        x[1, 5] = torch.nan
        weight = torch.ones(32)
        for found in (
            ops.rms_norm(weight, 1e-6)(x).sum(1),
            ops.silu_mul(x).sum(1),
            ops.linear(LinearWeights(torch.ones(40, 32)))(x).sum(1),
            ops.linear(quantise_int8(LinearWeights(torch.ones(40, 32))))(x).sum(1),
            ops.linear(quantise_int4(LinearWeights(torch.ones(40, 32))))(x).sum(1),
        ):
            assert found.isnan().tolist() == [False, True, False], isa
        sequences = Sequences([9, 9], shape, torch.float32, 4, seed=2)
        attention = NativeAttention(ops.context, shape, torch.float32)
        sequences.cache[0, sequences.table[1, 0], 1] = torch.nan
        found = sequences.run(attention, [0, 1], [8, 8], [9, 9])
        assert found.isnan().all(1).tolist() == [False, True], isa


def test_incompatible_library_is_not_used(tmp_path):
    missing = tmp_path / "missing.so"
    with pytest.raises(NativeUnavailableError, match="have not been compiled"):
        Library(missing)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(NativeUnavailableError, match="cannot be loaded"):
        Library(broken)
    for name, source, words in (
        ("old", 'extern "C" const char* asyncllm_sources() { return "0"; }', "from other sources"),
        ("other", "int nothing;", "cannot be loaded"),
    ):
        text, library = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
        text.write_text(source)
        subprocess.run([*compiler(), "-shared", "-fPIC", str(text), "-o", str(library)], check=True)
        with pytest.raises(NativeUnavailableError, match=words):
            Library(library)


def test_missing_instruction_set_is_refused():
    with pytest.raises(NativeUnavailableError, match="mmx with 2 threads"):
        context(2, "mmx")


def test_compiler_failure_has_its_output(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: expected no-such-compiler"):
        find_compiler()
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho no room for headers >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(BuildError, match="no room for headers"):
        build(tmp_path / "out.so", compiler=[str(script)])
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.slow
def test_units_leave_nothing_for_the_linker_to_mix(tmp_path):
    """A function that two units define is one of them after linking, and that one may have
    instructions that the processor lacks."""
    if os.uname().machine != "x86_64":
        pytest.skip("a unit of x86_64")
    name, target = "avx2", tmp_path / "unit.o"
    flags = [flag for flag in COMPILER_FLAGS if flag != "-O2"] + ["-O0", *ISA_FLAGS["x86_64"][name]]
    subprocess.run(
        [
            *compiler(),
            *flags,
            "-c",
            str(SOURCE_DIRECTORY / f"kernels_{name}.cpp"),
            "-o",
            str(target),
        ],
        check=True,
    )
    listed = subprocess.run(
        ["nm", "--defined-only", "--extern-only", str(target)],
        check=True,
        capture_output=True,
        text=True,
    )
    symbols = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert symbols == {f"kernels_{name}"}


def build_fuzz(folder: Path, command: list[str], machine: str, flags: list[str]) -> Path:
    library, program = folder / "libops.so", folder / "fuzz"
    build(
        library, compiler=command, machine=machine, only_isas=[ISAS[0], "neon"], extra_flags=flags
    )
    link(program, library, command, flags)
    return program


@pytest.mark.slow
def test_a_few_rounds_of_the_fuzz(tmp_path):
    """On the library that is there, so that the fuzz keeps up with its interface."""
    link(tmp_path / "fuzz", LIBRARY_PATH, compiler(), ["-O0"])
    for isa in ISAS:
        run_fuzz(tmp_path / "fuzz", 100, 3, isa)


SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all -O1".split()


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    program = build_fuzz(tmp_path, compiler(), os.uname().machine, SANITIZED)
    for isa in (ISAS[0], "baseline"):
        run_fuzz(program, 1, 20, isa)


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="emulates AVX-512 with AVX2")
def test_avx512_computes_the_same(tmp_path):
    """Its kernels in halves of AVX2, by the fuzz under the sanitizers and by the other tests."""
    compiler()
    library, program = tmp_path / "libops.so", tmp_path / "fuzz"
    build_emulated(library, SANITIZED)
    link(program, library, find_compiler(), SANITIZED)
    for isa in ("avx512", "avx512bf16"):
        run_fuzz(program, 1, 10, isa)
    build_emulated(library)
    files = ("native", "native_sampling", "quantisation", "int4", "ops", "recorded_step")
    tests = [str(Path(__file__).parent / f"test_{name}.py") for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "avx512", *tests],
        env=os.environ | {OTHER_LIBRARY: str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_neon_computes_the_same(tmp_path):
    """Compiled for 64-bit ARM and run by QEMU."""
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    program = build_fuzz(tmp_path, ["aarch64-linux-gnu-g++"], "aarch64", ["-O1"])
    for isa in ("neon", "baseline"):
        run_fuzz(program, 1, 8, isa, "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


def test_threads_by_affinity_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    membership = tmp_path / "membership"

    def found() -> int:
        return available_cpus(tmp_path, membership)

    assert found() == 6
    for text, expected in (("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert found() == expected
    (tmp_path / "cpu.max").write_text("900000 100000\n")
    assert found() == 6
    # Of the groups that a process is in, one within the other, the least counts.
    service = tmp_path / "system.slice" / "host.service"
    service.mkdir(parents=True)
    membership.write_text("0::/system.slice/host.service\n")
    assert found() == 6
    for folder, limit, expected in ((service, 5, 5), (service.parent, 3, 3), (service, 2, 2)):
        (folder / "cpu.max").write_text(f"{limit}00000 100000\n")
        assert found() == expected
    membership.write_text("0::/another/of/the/host\n")
    assert found() == 6
    (tmp_path / "cpu.max").unlink()
    group = tmp_path / "cpu" / "docker"
    group.mkdir(parents=True)
    membership.write_text("5:memory:/docker\n4:cpu,cpuacct:/docker\n0::/\n")
    for folder in (group.parent, group):
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        for quota, expected in (("-1", 6), ("300000", 3)):
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            assert found() == expected
        (folder / "cpu.cfs_quota_us").write_text("-1\n")


@needs_native
async def test_threads_end_with_the_engine():
    before = len(own_threads())
    gc.disable()
    try:
        async with AsyncLLMEngine(attention_backend="native", num_threads=3) as engine:
            await engine.stream("Once", max_tokens=2).result()
            assert len(own_threads()) == before + 2
        assert len(own_threads()) == before
    finally:
        gc.enable()


def time_slice(thread: int) -> int:
    """Nanoseconds; 0 where the system has none of its own for a thread."""
    attributes = (ctypes.c_uint64 * 7)()
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]  # sched_getattr
    assert libc.syscall(number, thread, attributes, ctypes.sizeof(attributes), 0) == 0
    return attributes[3]


@needs_native
async def test_threads_that_compute_have_long_slices():
    """So that the application's thread preempts them as soon as it wakes."""
    mine = time_slice(threading.get_native_id())
    if not mine:
        pytest.skip("Linux before 6.12 has the same slices for all threads")
    async with AsyncLLMEngine(attention_backend="native", num_threads=2) as engine:
        await engine.stream("Once", max_tokens=2).result()
        engines = [t.native_id for t in threading.enumerate() if t.name.startswith("asyncllm-eng")]
        computing = [*engines, *own_threads()]
        assert len(computing) == 2
        assert {time_slice(thread) for thread in computing} == {5_000_000}
        assert time_slice(threading.get_native_id()) == mine


@each_isa
def test_memory_is_read_whole(isa):
    ops = NativeOps(context(2, isa))
    generator = torch.Generator().manual_seed(0)
    for count in (0, 8, 40_000, 3 * 2**15 + 8):
        memory = torch.randint(-(2**62), 2**62, (count,), generator=generator)
        assert ops.sum_int64(memory) == int(memory.sum())
    memory = torch.ones(65, dtype=torch.int64)
    for wrong in (memory[:7], memory[:63]):  # no multiple of 64 bytes
        with pytest.raises(RuntimeError, match="native read: shapes, strides"):
            ops.sum_int64(wrong)


def test_bytes_read_by_a_step():
    weights, ops = LinearWeights(torch.zeros(16, 8)), NativeOps(context(1, "baseline"))
    ops.linear(weights)
    ops.linear(quantise_int8(weights))
    ops.tied_embedding(LinearWeights(torch.zeros(4, 8)), torch.float32)
    assert ops.linear_bytes == 16 * 8 * 4 + (16 * 8 + 16 * 4) + 4 * 8 * 4
