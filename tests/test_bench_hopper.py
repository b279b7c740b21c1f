"""The script for a real GPU, tried on tiny shapes: it must be right the first time it runs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import hopper
import hopper_kernels
import numpy as np
import pytest

SCRIPT = Path(hopper.__file__)


def script(*arguments, **environment):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_a_trial_run_fills_every_section_and_finds_nothing_wrong(tmp_path):
    out = tmp_path / "report.json"
    fast = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile, which takes most of the time
    done = script("--dry-run", "--seconds", "900", "--out", out, **fast)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert list(report["sections"]) == list(hopper.SECTIONS)
    assert all(report["sections"].values())
    checked = [x for case in report["sections"]["correctness"].values() for x in case.values()]
    verdicts = [x["correct"] for x in checked if isinstance(x, dict)]
    assert verdicts == [True] * 6  # of a tree and two rules, by two implementations each
    (attention,) = report["sections"]["attention"].values()
    assert attention["xla"]["of_copy_bandwidth"] > 0
    (generation,) = report["sections"]["generation"].values()
    assert generation["xla"]["tokens_per_second"] > 0


def test_without_the_right_gpu_it_says_so_in_one_line(tmp_path):
    done = script("--out", tmp_path / "report.json", JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert done.stderr.strip() == "needs a GPU of compute capability 9.0, found cpu"


def fails():
    raise ValueError("no good")


@pytest.mark.parametrize("end", ["crash", "hang"])
def test_a_case_that_ends_its_process_costs_itself_alone(tmp_path, monkeypatch, end):
    """The section's processes are played by this one: the first dies inside its second case."""

    def process(section, part, deadline, trial):
        cases = {"good": dict, "dies": sys.exit, "fails": fails, "last": dict}
        monkeypatch.setitem(hopper.CASES, section, lambda trial: cases)
        try:
            return hopper.run_cases(section, part, deadline, trial)
        except SystemExit:
            return -9 if end == "crash" else -1

    monkeypatch.setattr(hopper, "run_process", process)
    found = hopper.run_section("rates", tmp_path, time.time() + 60, trial=True)
    assert "error" not in found["good"] | found["last"]
    assert found["dies"] == {"error": hopper.UNFINISHED}
    assert found["fails"]["error"] == "ValueError: no good"
    assert hopper.wrongs(found) == [f"dies: {hopper.UNFINISHED}", "fails: ValueError: no good"]


def test_a_process_that_never_gets_to_a_case_ends_its_section(tmp_path, monkeypatch):
    monkeypatch.setattr(hopper, "run_process", lambda *_: 1)
    found = hopper.run_section("rates", tmp_path, time.time() + 60, trial=True)
    assert found == {"section": {"error": "the process of this section ended with 1"}}


def test_a_case_that_time_cuts_off_is_no_error(tmp_path, monkeypatch):
    def process(section, part, deadline, trial):
        hopper.write_json(part, {"hung": {"error": hopper.UNFINISHED}})
        time.sleep(max(0.0, deadline - time.time()) + 0.01)
        return -1

    monkeypatch.setattr(hopper, "run_process", process)
    found = hopper.run_section("rates", tmp_path, time.time() + 0.1, trial=True)
    assert found == {"hung": {"cut_off": "the time of this section was up"}}


def test_a_process_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(hopper, "STALLED", 0)
    code = hopper.run_process("rates", tmp_path / "part.json", time.time() + 60, trial=True)
    assert code == -1


@pytest.mark.parametrize("rule", ["rejection", "rejection, certain drafts", "coupled"])
def test_a_wrong_decision_is_seen(monkeypatch, rule):
    case = hopper_kernels.Sampling(rule, 3, 2, 512)
    decide = hopper_kernels.decide
    assert hopper_kernels.check_sampling(case, 1, ("xla",))["xla"]["correct"]
    for change in (1, 0), (0, 1):
        monkeypatch.setattr(
            hopper_kernels,
            "decide",
            lambda *a, implementation, c=change: tuple(
                x + np.int32(d)
                for x, d in zip(decide(*a, implementation=implementation), c, strict=True)
            ),
        )
        assert not hopper_kernels.check_sampling(case, 1, ("xla",))["xla"]["correct"]


def test_a_wrong_attention_is_seen(monkeypatch):
    check = hopper_kernels.TINY_CHECKS[0]
    plain = hopper_kernels.paged_attention
    assert hopper_kernels.check_attention(check, 1, ("xla",))["xla"]["correct"]

    def without_mask(*arrays, mask, **settings):
        return plain(*arrays, **settings)

    monkeypatch.setattr(hopper_kernels, "paged_attention", without_mask)
    assert not hopper_kernels.check_attention(check, 1, ("xla",))["xla"]["correct"]


def test_what_a_gpu_would_run_can_be_listed():
    """Nothing here can run it; its shapes, costs and names can be looked at."""
    first, more = hopper.attentions(trial=False)
    names = [case.name for case in (*first, *more)]
    assert len(set(names)) == len(names)
    assert all(0 < case.cost.bytes < 20e9 for case in more)
    assert len(hopper.generation(trial=False)) == 4
    assert {case.rule for case in hopper.verifications(trial=False)} == {
        "rejection",
        "rejection, certain drafts",
        "coupled",
    }
