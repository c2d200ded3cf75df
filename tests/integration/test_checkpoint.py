"""Runs that are stopped, killed and continued: bit for bit what an uninterrupted run gives."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import newtention as nt
from newtention import Status, zoo
from newtention.checkpoint import KEY

pytestmark = pytest.mark.usefixtures("unchecked")
"""Thousands of iterations, which the run-time type checker makes ten times as slow."""


def randn(g, *shape):
    return torch.randn(shape, generator=g, dtype=torch.float64)


def factored(seed=0, noise=0.2, **settings):
    """A problem of three sequences and a layer near the one that made its targets."""
    g = torch.Generator().manual_seed(seed)
    h, groups, d, e, f, p = 2, 1, 5, 2, 3, 4
    parts = {
        "W_Q": randn(g, h, d, e),
        "b_Q": randn(g, h, e),
        "W_K": randn(g, groups, d, e),
        "b_K": randn(g, groups, e),
        "W_V": randn(g, groups, d, f),
        "W_O": randn(g, h, f, p),
        "b_O": randn(g, p),
    }
    layer = nt.FactoredAttention(**parts, scale=e**-0.5)
    A, offsets = randn(g, 30, d), [0, 9, 18, 30]
    B = randn(g, 30, p)
    problem = nt.AttentionProblem.from_ragged(A, B, offsets=offsets, **settings)
    F = nt.predict(problem, layer)
    problem = nt.AttentionProblem.from_ragged(A, F + noise * B, offsets=offsets, **settings)
    start = {n: t + 0.3 * randn(g, *t.shape) for n, t in parts.items()}
    return problem, replace(layer, **start)


def bilinear(seed=1, noise=0.3):
    made = zoo.planted(3, 24, noise, "clustered", seed=seed)
    g = torch.Generator().manual_seed(seed)
    return made.problem, made.X + 0.3 * randn(g, 3, 3)


def dense(n_init=1):
    problem, start = bilinear()
    return problem, {"start": start, "method": "newton", "n_init": n_init, "max_iter": 30}


def cg(problem, start, **settings):
    options = nt.Options(**{"max_products": 6} | settings.pop("options", {}))
    return problem, {
        "start": start,
        "method": "newton-cg",
        "max_iter": 4,
        "options": options,
    } | settings


RUNS = {
    "newton": dense,
    "newton, three starts": lambda: dense(3),
    "factored": lambda: cg(*factored()),
    "factored, random starts": lambda: cg(factored()[0], None, n_init=2, options={"ranks": (2, 3)}),
    "bilinear": lambda: cg(*bilinear()),
    "two starts": lambda: cg(*bilinear(), n_init=2),
    "ridge": lambda: cg(*factored(regularizer=nt.Ridge(0.1, 0.1)), tol=1e-3),
    "full curvature": lambda: cg(*factored(), options={"curvature": "full"}),
    "part of the data": lambda: cg(*factored(), options={"curvature_share": 0.4}),
    "frozen": lambda: cg(*factored(), options={"freeze": ["W_V", "b_O"]}),
    "nothing kept": lambda: cg(*factored(), options={"cache_bytes": 0}),
    "many products": lambda: cg(*factored(), options={"max_products": 40}),
    "validation": lambda: cg(*factored(), validation=factored(noise=0.8)[0]),
    "validation, two starts": lambda: cg(
        *factored(),
        validation=factored(noise=2.0, seed=2)[0],
        n_init=2,
        max_iter=8,
        options={"patience": 2},
    ),
    "validation, newton": lambda: (
        lambda problem, settings: (problem, settings | {"validation": bilinear(noise=2.0)[0]})
    )(*dense(2)),
}


def outcome(solution):
    """All of a solution but its times."""
    rows = [asdict(r) for r in solution.history]
    for row in rows:
        assert row.pop("seconds") <= solution.seconds
        row["radius"] = repr(row["radius"])
    return {
        "weights": solution.layer.theta.tolist(),
        "start": solution.start.theta.tolist(),
        "history": rows,
        "status": solution.status,
        "losses": [solution.loss, solution.data_loss, solution.penalty, solution.relative_loss],
        "start losses": solution.start_losses,
        "validation": solution.validation_loss,
        "method": solution.method,
    }


def require_same(found, wanted):
    """Bitwise; the first difference is named."""
    for name, value in outcome(wanted).items():
        other = outcome(found)[name]
        if name == "history":
            for ours, theirs in zip(other, value, strict=True):
                assert ours == theirs
        assert other == value, name


def stop_at(call, error=StopIteration):
    """A callback that raises at its call number `call`, counted from 0."""
    calls = []

    def callback(progress):
        calls.append(progress)
        if len(calls) == call + 1:
            raise error

    return callback


@pytest.fixture(scope="module")
def whole():
    """The uninterrupted runs, and how often their callbacks were called."""
    known = {}

    def run(name):
        if name not in known:
            problem, settings = RUNS[name]()
            calls = []
            solution = nt.solve(problem, callback=calls.append, **settings)
            known[name] = solution, len(calls)
        return known[name]

    return run


def test_the_runs_are_long_enough(whole):
    """Or the tests below would show nothing."""
    for name in RUNS:
        assert whole(name)[1] >= 4, name
    assert whole("validation, two starts")[0].status is Status.EARLY_STOP
    problem, settings = RUNS["newton, three starts"]()
    ended = []
    nt.solve(problem, callback=lambda p: ended.append(p.ended), **settings)
    assert any(0 < sum(e) < 3 for e in ended)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_changes_nothing(name, whole, tmp_path):
    problem, settings = RUNS[name]()
    require_same(nt.solve(problem, checkpoint=tmp_path / "state", **settings), whole(name)[0])
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    "error", [StopIteration, pytest.param(KeyboardInterrupt, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", RUNS)
def test_stopped_anywhere_and_continued(name, error, whole, tmp_path):
    """Stopped once, at any of the points."""
    wanted, calls = whole(name)
    problem, settings = RUNS[name]()
    for call in range(0 if error is StopIteration else 1, calls, 1 if calls < 12 else 3):
        path = tmp_path / f"state{call}"
        stopped = nt.solve(problem, callback=stop_at(call, error), checkpoint=path, **settings)
        last = call == calls - 1
        status = Status.STOPPED if error is StopIteration else Status.INTERRUPTED
        assert last or stopped.status in (status, *_ENDS)
        require_same(nt.solve(problem, checkpoint=path, **settings), wanted)


_ENDS = (Status.CONVERGED, Status.ITERATION_LIMIT, Status.EARLY_STOP, Status.STALLED)
"""Statuses of starts that had ended before the run was stopped."""


@pytest.mark.parametrize("name", RUNS)
def test_stopped_after_every_step(name, whole, tmp_path):
    """As often as there are points: every run takes one step."""
    wanted, calls = whole(name)
    problem, settings = RUNS[name]()
    path = tmp_path / "state"
    for _ in range(calls):
        nt.solve(problem, callback=stop_at(1), checkpoint=path, **settings)
    require_same(nt.solve(problem, checkpoint=path, **settings), wanted)


@pytest.mark.parametrize("name", RUNS)
def test_raising_the_iteration_limit_continues(name, whole, tmp_path):
    wanted, _ = whole(name)
    problem, settings = RUNS[name]()
    path = tmp_path / "state"
    for limit in (0, 1, 3):
        solution = nt.solve(problem, checkpoint=path, **settings | {"max_iter": limit})
        assert solution.iterations <= limit
    require_same(nt.solve(problem, checkpoint=path, **settings), wanted)


def test_lowering_the_iteration_limit_stops_where_it_is(tmp_path):
    for name in ("newton", "factored"):
        problem, settings = RUNS[name]()
        path = tmp_path / name
        settings |= {"max_iter": 3}
        first = nt.solve(problem, checkpoint=path, **settings)
        again = nt.solve(problem, checkpoint=path, **settings | {"max_iter": 1})
        assert again.status is Status.ITERATION_LIMIT
        require_same(again, first)


class Clock:
    """Seconds that pass with every product and every point, and not otherwise."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("name", RUNS)
def test_time_limits_and_continued(name, whole, tmp_path, monkeypatch, full):
    """The limit strikes at points, between products and between trial steps."""
    wanted, _ = whole(name)
    problem, settings = RUNS[name]()
    for step in (7, 20) if full else (20,):
        clock = Clock()
        monkeypatch.setattr("newtention.run.time.perf_counter", clock)
        path = tmp_path / f"state{step}"
        seconds, solution, ended = 0, None, False
        while not ended:
            seconds += step
            solution = nt.solve(problem, checkpoint=path, max_seconds=seconds, **settings)
            assert all(math.isfinite(r.decrement) for r in solution.history)
            ended = solution.status is not Status.TIME_LIMIT and seconds > 150
        require_same(solution, wanted)
    monkeypatch.undo()


def test_no_time_at_all(whole, tmp_path):
    for name in ("newton", "factored", "two starts"):
        problem, settings = RUNS[name]()
        path = tmp_path / name
        for _ in range(2):
            solution = nt.solve(problem, checkpoint=path, max_seconds=0, **settings)
            assert solution.status is Status.TIME_LIMIT
            assert solution.iterations == 0
        require_same(nt.solve(problem, checkpoint=path, **settings), whole(name)[0])


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_is_not_repeated(name, whole, tmp_path):
    """Its checkpoint gives the same solution, after one look at its last points."""
    wanted, _ = whole(name)
    problem, settings = RUNS[name]()
    path = tmp_path / "state"
    nt.solve(problem, checkpoint=path, **settings)
    calls = []
    again = nt.solve(problem, checkpoint=path, callback=calls.append, **settings)
    require_same(again, wanted)
    assert len(calls) <= settings.get("n_init", 1)


def test_seconds_add_up(tmp_path):
    problem, settings = RUNS["factored"]()
    path = tmp_path / "state"

    def slow(progress):
        time.sleep(0.05)
        if progress.iteration == 2:
            raise StopIteration

    first = nt.solve(problem, callback=slow, checkpoint=path, **settings)
    second = nt.solve(problem, checkpoint=path, **settings)
    assert first.seconds >= 0.15
    assert second.seconds >= 0.1
    seconds = second.history.column("seconds")
    assert seconds == sorted(seconds)
    assert seconds[-1] <= second.seconds


# Killed


CHILD = """
import sys
import torch
torch.set_num_threads(int(sys.argv[1]))
import newtention as nt
from newtention import zoo
from dataclasses import replace

made = zoo.planted(4, 200, 0.3, "clustered", seed=1)
layer = nt.BilinearAttention(made.X + 0.3, made.Y)
options = nt.Options(curvature="full")
solution = nt.solve(
    made.problem, start=layer, method=sys.argv[2], n_init=2, max_iter=12, tol=1e-14,
    checkpoint=sys.argv[3], options=options,
    callback=lambda p: print(p.iteration, flush=True),
)
print(solution.layer.theta.tolist(), solution.history.column("loss"), solution.status)
"""


def child(threads, method, path):
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", CHILD, str(threads), method, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("threads", "method"),
    [
        pytest.param(1, "newton", marks=pytest.mark.full),
        pytest.param(1, "newton-cg", marks=pytest.mark.full),
        (2, "newton-cg"),
    ],
)
def test_killed_at_random_and_continued(method, threads, tmp_path):
    """SIGKILL at random points of the run, in the middle of whatever it does."""
    wanted = child(threads, method, tmp_path / "whole").communicate(timeout=60)[0].splitlines()[-1]
    g = torch.Generator().manual_seed(threads)
    path, killed = tmp_path / "state", 0
    for _ in range(2):
        process = child(threads, method, path)
        assert process.stdout is not None
        for _ in range(int(torch.randint(2, 7, (), generator=g))):
            process.stdout.readline()
        time.sleep(float(torch.rand((), generator=g)) * 0.02)
        process.send_signal(signal.SIGKILL)
        killed += process.wait(timeout=60) == -signal.SIGKILL
        process.stdout.close()
        safetensors.torch.load_file(path)  # whole, whenever it was killed
    output = child(threads, method, path).communicate(timeout=60)[0].splitlines()
    assert killed >= 1
    assert output[-1] == wanted


# Files that do not fit


@pytest.fixture
def made(tmp_path):
    """A problem, settings and the checkpoint of a stopped run."""
    problem, settings = RUNS["factored"]()
    path = tmp_path / "state"
    nt.solve(problem, callback=stop_at(2), checkpoint=path, **settings)
    return problem, settings, path


@contextlib.contextmanager
def refused(path, error, match):
    """One sentence, and the file as it was."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(error, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_another_run_is_refused(made):
    problem, settings, path = made
    start, options = settings["start"], settings["options"]
    other = {
        "its data": (factored(seed=1)[0], {}),
        "its data is": (problem.with_regularizer(nt.Ridge(0.1, 0.1)), {}),
        "its start": (problem, {"start": start.with_theta(start.theta * (1 + 1e-15))}),
        "its tolerance is 1e-10, this run's 1e-06": (problem, {"tol": 1e-6}),
        "its method is newton-cg, this run's auto": (problem, {"method": "auto"}),
        "its n_init is 1, this run's 2": (problem, {"n_init": 2}),
        "its seed is 0, this run's 1": (problem, {"seed": 1}),
        r"its Options\(max_products=\) is 6, this run's 7": (
            problem, {"options": replace(options, max_products=7)}
        ),
        r"its Options\(freeze=\)": (problem, {"options": replace(options, freeze=["W_V"])}),
        "its validation data is missing": (problem, {"validation": factored(seed=2)[0]}),
    }  # fmt: skip
    for match, (data, change) in other.items():
        with refused(path, ValueError, f"belongs to another run: {match}"):
            nt.solve(data, checkpoint=path, **settings | change)


def test_other_data_in_one_number_is_refused(made):
    """The last target, by one rounding."""
    _, settings, path = made
    problem = factored()[0]
    chunk = problem.chunks[-1]
    chunk.B[..., 0, 0] *= 1 + 4e-16
    with refused(path, ValueError, "its data"):
        nt.solve(problem, checkpoint=path, **settings)


def test_another_scale_of_the_same_weights_is_refused(made):
    problem, settings, path = made
    other = replace(settings["start"], scale=0.123)
    with refused(path, ValueError, "belongs to another run: its layer"):
        nt.solve(problem, checkpoint=path, **settings | {"start": other})


def test_validation_left_out_is_refused(tmp_path):
    problem, settings = RUNS["validation"]()
    path = tmp_path / "state"
    nt.solve(problem, callback=stop_at(1), checkpoint=path, **settings)
    del settings["validation"]
    with refused(path, ValueError, "its validation data is .* this run's missing"):
        nt.solve(problem, checkpoint=path, **settings)


def test_another_number_of_threads_is_refused(made):
    problem, settings, path = made
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        with refused(path, ValueError, "its number of threads"):
            nt.solve(problem, checkpoint=path, **settings)
    finally:
        torch.set_num_threads(before)


def test_float32_is_another_run(tmp_path):
    path = tmp_path / "state"
    for dtype in (torch.float64, torch.float32):
        made = zoo.planted(3, 16, 0.1, "clustered", dtype=dtype)
        solve = lambda made=made: nt.solve(made.problem, start=made.X, checkpoint=path)  # noqa: E731
        if dtype == torch.float64:
            solve()
        else:
            with refused(path, ValueError, "another run"):
                solve()


@pytest.mark.parametrize("kept", [0, 3, 8, 100, -1])
def test_truncated(made, kept):
    problem, settings, path = made
    path.write_bytes(path.read_bytes()[:kept])
    with refused(path, ValueError, "is damaged or of another kind .*; delete it"):
        nt.solve(problem, checkpoint=path, **settings)


@pytest.mark.parametrize("content", [b"garbage" * 30, bytes(200), b"\x80\x04N."])
def test_garbage(made, content):
    """Never unpickled, whatever it is."""
    problem, settings, path = made
    path.write_bytes(content)
    with refused(path, ValueError, "is damaged or of another kind .*; delete it"):
        nt.solve(problem, checkpoint=path, **settings)


def test_a_bit_flip(made):
    """In the numbers: nothing but a checksum would notice."""
    problem, settings, path = made
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(bytes(content))
    with refused(path, ValueError, "is damaged; delete it"):
        nt.solve(problem, checkpoint=path, **settings)


def test_a_file_of_something_else(made):
    problem, settings, path = made
    safetensors.torch.save_file({"weights": torch.zeros(3)}, path)
    with refused(path, ValueError, "was not written by Newtention; give another path"):
        nt.solve(problem, checkpoint=path, **settings)
    for text in ("[]", "{", "{}", '{"identity": 1, "choices": 2, "run": 3, "version": 2}'):
        safetensors.torch.save_file({"weights": torch.zeros(3)}, path, metadata={KEY: text})
        with refused(path, ValueError, "was not written by Newtention"):
            nt.solve(problem, checkpoint=path, **settings)


def test_another_version(made):
    problem, settings, path = made
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()[KEY])
    document["version"] += 1
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, metadata={KEY: json.dumps(document)})
    with refused(path, ValueError, "has version 3; this version of Newtention reads 2"):
        nt.solve(problem, checkpoint=path, **settings)


def test_folders(made, tmp_path):
    problem, settings, _ = made
    with refused(tmp_path, IsADirectoryError, "must be a file; .* is a directory"):
        nt.solve(problem, checkpoint=tmp_path, **settings)
    missing = tmp_path / "no" / "state"
    with refused(missing, FileNotFoundError, "There is no folder .*no for the checkpoint"):
        nt.solve(problem, checkpoint=missing, **settings)
    assert not missing.parent.exists()


def test_a_checkpoint_is_a_path(unchecked):
    problem, settings = RUNS["factored"]()
    with pytest.raises(TypeError, match="checkpoint must be a path; found int"):
        nt.solve(problem, checkpoint=3, **settings)
