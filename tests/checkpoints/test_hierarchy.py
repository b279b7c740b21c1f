"""The suite of self-speculation: what it chooses, runs, counts and prints."""

import json

import numpy as np
import pytest
from checkpoint_files import hf_config, hf_tensors, write_hf

from jspec import hierarchy, hierarchy_table
from jspec.benchmark import Prompt
from jspec.calibrate import Calibration
from jspec.cli import _numbers
from jspec.cost_model import SIZES, counted, layer_weights, stretched
from jspec.errors import JspecError
from jspec.hierarchy import BELOW, HISPEC, SINGLE, Method, Settings
from jspec.plans import Costs, Sight
from pallas_kernels.costs import H100

BEST = np.random.default_rng(0).integers(0, 50, 200)


def wrong(share):
    """The text with so large a share of other tokens."""
    return np.where(np.random.default_rng(1).random(200) < share, 99, BEST)


def calibration():
    """Exits that are right more often the later they are, n-grams that know two tokens or none."""
    said = {2: wrong(0.5), 4: wrong(0.3), 9: wrong(0.1)}
    ngrams = [BEST[i : i + 2].tolist() if i % 3 == 0 else [] for i in range(200)]
    costs = Costs(
        widths=(2, 9),
        layer=(1.0, 1.2),
        head=(4.0, 5.0),
        exit=(0.5, 0.7),
        ngrams=0.01,
        num_layers=12,
    )
    gaps = {
        layer: [{int(BEST[i]): 1.0} | {int(row[i]): 0.0} for i in range(200)]
        for layer, row in said.items()
    }
    return Calibration((Sight(BEST, said, ngrams, gaps),), costs, (2, 4, 9))


def test_what_is_chosen_and_why():
    methods = {method.label: method for method in hierarchy.choose(calibration())}
    single = methods[SINGLE]
    assert single.drafter == "early_exit(4, k=2)"  # 2.19 tokens in 25.9 s against 1.5 in 19.1 s
    assert "forecast" in single.why
    assert "next layers (9,)" in single.why
    assert methods["LayerSkip style"].drafter == "early_exit(4, exits=own, k=2)"
    assert methods[HISPEC].drafter.startswith("cascade(early_exit(")
    assert methods[BELOW].drafter.startswith("cascade(ngram(")
    assert methods["AdaDecode style"].drafter == "adaptive(4, 9)"
    assert all("ngram(2" not in method.drafter for method in methods.values())
    (head,) = [m for m in hierarchy.choose(calibration(), "HEAD") if "HEAD" in m.drafter]
    assert head.drafter == "cascade(ngram(2, k=2), HEAD, window=1, lenience=0.01)"
    lossy = [method for method in methods.values() if "lossy" in method.drafter]
    assert [method.label for method in lossy] == ["SPRINTER (lossy)"]


def test_counted_costs():
    """Llama-3 8B: 218 million weights a layer, read once a pass."""
    size = SIZES[0]
    weights = layer_weights(size.config)
    assert weights == 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
    costs = counted(size)
    assert costs.at("layer", 1) == pytest.approx(2 * weights / (0.7 * H100.bytes_per_second))
    # Sixteen billion bytes in all, but for the embedding: 7 ms at what is assumed to be reached.
    assert costs.plain() == pytest.approx(6.4e-3, rel=0.05)
    halved = counted(SIZES[3])  # on two GPUs
    assert SIZES[3].num_gpus == 2
    assert halved.at("layer", 1) == pytest.approx(
        layer_weights(SIZES[3].config) / (0.7 * H100.bytes_per_second)
    )


def test_exits_keep_their_share_of_the_depth():
    (text,) = stretched(calibration().texts, 12, 32)
    assert list(text.said) == list(text.gaps) == [5, 11, 24]


def test_predictions_are_of_every_size_and_kind():
    predicted = hierarchy.predict(calibration())
    assert [(p.model, p.method) for p in predicted] == [
        (size.name, kind) for size in SIZES for kind in (SINGLE, HISPEC, BELOW)
    ]
    assert all(p.speedup > 0.5 for p in predicted)


def run_tiny(folder_of, batch_sizes, at_size=hierarchy._at_size):
    """A run on a tiny model of four layers, two of the methods and one that is lossy."""
    config = hf_config(num_hidden_layers=4, max_position_embeddings=1024)
    folder = write_hf(folder_of / "tiny", config, hf_tensors(config))
    prompts = [Prompt(str(i), "c", text) for i, text in enumerate(("hello", "w hell", "he", "o"))]
    methods = [
        Method(SINGLE, "early_exit(2, k=2)", "because"),
        Method(HISPEC, "cascade(early_exit(1, k=2), early_exit:3, window=2)", "because"),
        Method("SPRINTER (lossy)", "lossy_sprinter(1, threshold=0.01)", "for comparison"),
    ]
    settings = Settings(
        "p", str(folder), "float32", 12, batch_sizes=batch_sizes, num_calibration_prompts=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchy, "choose", lambda *_: methods)
        patch.setattr(hierarchy, "calibrate", lambda *_, **__: calibration())
        patch.setattr(hierarchy, "_at_size", at_size)
        return hierarchy.run(settings, prompts, lambda *_: None)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("models"), (2,))


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), JspecError("no room for a batch of 4")])
def test_what_is_done_survives_a_stop(stop, tmp_path, capsys):
    size = hierarchy._Size([hierarchy.Cell(SINGLE, 2, 9.0, 1.5, 1.5, 2.0, 0.5, 1.0)], 6.0, {})

    def at_size(bench, methods, batch_size):
        if batch_size == 4:
            raise stop
        return size

    found = run_tiny(tmp_path, (2, 4), at_size)
    assert found.stopped_by is stop
    assert list(found.cells) == size.cells
    assert found.plain_tokens_per_second == {2: 6.0}
    hierarchy.write_json(found, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["complete"] is False
    with pytest.raises(type(stop)):  # nothing is done yet
        run_tiny(tmp_path, (4,), at_size)


def test_a_run(report):
    names = [method.label for method in report.methods]
    assert [(cell.batch_size, cell.method) for cell in report.cells] == [(2, n) for n in names]
    exact = [cell for cell in report.cells if "lossy" not in cell.method]
    assert all(cell.own_share == 1.0 for cell in exact)
    assert all(cell.mean_acceptance_length >= 1.0 for cell in report.cells)
    assert all(cell.speedup > 0 for cell in report.cells)
    assert min(c.own_share for c in report.cells if "lossy" in c.method) < 0.9


def test_a_cascade_keeps_nothing_that_a_single_exit_does_not(report):
    assert report.resident_bytes[HISPEC] == report.resident_bytes[SINGLE]


def test_the_report_fits_the_terminal(report, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    hierarchy_table.print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "SPRINTER (lossy)",
        "Llama-3 70B",
        "assumed:",
        "memory of the cascade",
        "because",
    ):
        assert words in text
    hierarchy.write_json(report, tmp_path / "report.json")
    assert len(json.loads((tmp_path / "report.json").read_text())["cells"]) == 3


def test_the_choice_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = calibration()
    hierarchy_table.print_choice(hierarchy.best_plans(found), found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any('--drafter "early_exit(4, k=2)"' in line for line in lines)


def test_bad_input():
    with pytest.raises(JspecError, match="2 prompts: a batch of 16 needs as many"):
        hierarchy.run(Settings("p", "m"), [Prompt("1", "c", "x")] * 2, lambda *_: None)
    for text in ("1,x", "0", "", "1,,2"):
        with pytest.raises(JspecError, match="--batch-sizes"):
            _numbers("--batch-sizes", text)
    assert _numbers("--batch-sizes", "4, 1,4") == (1, 4)
