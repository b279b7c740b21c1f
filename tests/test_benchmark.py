"""Reading prompts, the arithmetic of the bench, interleaving and the peer protocol."""

from __future__ import annotations

import json
import shlex
import sys
import types

import pytest

from jspec import benchmark
from jspec.benchmark import PEER, PLAIN, Generation, Prompt, Sample
from jspec.errors import JspecError
from jspec.metrics import Metrics


def write(path, *lines: str):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def question(number: int, category: str, text: str = "Why?") -> str:
    return json.dumps({"question_id": number, "category": category, "turns": [text, "And?"]})


def plain(tokens: int, seconds: float, ids=(7,)) -> Generation:
    metrics = Metrics(
        num_prompt_tokens=10, num_tokens=tokens, num_rounds=tokens, decode_seconds=seconds
    )
    return Generation(ids, metrics)


def drafted(tokens: int, seconds: float, rounds: int, accepted: int, ids=(7,)) -> Generation:
    metrics = Metrics(
        num_prompt_tokens=10,
        num_tokens=tokens,
        num_rounds=rounds,
        drafted_per_position=(rounds, rounds),
        accepted_per_position=(accepted, 0),
        decode_seconds=seconds,
    )
    return Generation(ids, metrics)


A, B, C = Prompt("1", "qa", "a"), Prompt("2", "qa", "b"), Prompt("3", "math", "c")
SAMPLES = [
    Sample(A, {"ngram": drafted(10, 1.0, 5, 5), PLAIN: plain(10, 2.0)}),
    Sample(B, {"ngram": drafted(20, 1.0, 15, 5), PLAIN: plain(20, 4.0)}),
    Sample(C, {"ngram": drafted(10, 2.0, 10, 0, ids=(8,)), PLAIN: plain(10, 1.0)}),
]


def test_load_takes_first_turns_and_skips_blank_lines(tmp_path):
    path = write(tmp_path / "p.jsonl", question(1, "qa"), "", question(2, "math", "How?"))
    assert benchmark.load_prompts(path) == [
        Prompt("1", "qa", "Why?"),
        Prompt("2", "math", "How?"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ("[1]", "p.jsonl:2: not a JSON object"),
        ('{"turns": ["a"]}', "p.jsonl:2: no category"),
        ('{"category": "qa"}', "p.jsonl:2: no turns"),
        ('{"category": "qa", "turns": [1]}', "p.jsonl:2: no turns"),
        ('{"category": "qa", "turns": [" "]}', "p.jsonl:2: the first turn is empty"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    with pytest.raises(JspecError, match=message):
        benchmark.load_prompts(write(tmp_path / "p.jsonl", question(1, "qa"), line))


def test_files_without_prompts_are_named(tmp_path):
    with pytest.raises(JspecError, match=r"p\.jsonl: no prompts"):
        benchmark.load_prompts(write(tmp_path / "p.jsonl", "", " "))
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(JspecError, match="latin: not UTF-8"):
        benchmark.load_prompts(tmp_path / "latin")


def test_select_limits_each_category():
    assert benchmark.select_prompts([A, B, C], limit=1) == [A, C]
    assert benchmark.select_prompts([A, B, C], ["qa"]) == [A, B]
    with pytest.raises(JspecError, match="no category 'poems'; there are qa, math"):
        benchmark.select_prompts([A, B, C], ["qa", "poems"])


def test_warm_up_visits_each_capacity_once():
    assert benchmark.one_per_capacity([512, 400, 513, 1024, 1025, 200]) == [0, 2, 4, 5]


def test_compare_sums_over_categories():
    qa, math, overall = benchmark.compare(SAMPLES, "ngram", PLAIN)
    assert (qa.category, math.category, overall.category) == ("qa", "math", "overall")
    assert (qa.num_prompts, qa.num_tokens) == (2, 30)
    assert (qa.tokens_per_second, qa.baseline_tokens_per_second) == (15.0, 5.0)
    assert qa.speedup == 3.0
    assert qa.median_speedup == 3.0  # of 2 and 4
    assert qa.acceptance_rate == 10 / 40
    assert qa.mean_acceptance_length == 1.5
    assert qa.acceptance_per_position == (0.5, 0.0)
    assert (math.speedup, math.num_same_text) == (0.5, 0)
    assert (overall.tokens_per_second, overall.speedup) == (10.0, 10.0 / (40 / 7))
    assert overall.median_speedup == 2.0
    assert (overall.num_same_text, overall.num_prompts) == (2, 3)


def test_a_prompt_is_the_same_only_if_every_repeat_is():
    other = Sample(A, {"ngram": drafted(10, 1.0, 5, 5, ids=(9,)), PLAIN: plain(10, 2.0)})
    row = benchmark.compare([SAMPLES[0], other], "ngram", PLAIN)[-1]
    assert (row.num_prompts, row.num_same_text) == (1, 0)


def test_no_samples_no_rows():
    assert benchmark.compare([], "ngram", PLAIN) == ()


def test_efficiency_is_measured_over_possible():
    overall = benchmark.compare(SAMPLES[:1], "ngram", PLAIN)[-1]  # speed-up 2, mean length 2
    times = types.SimpleNamespace(plain_seconds=0.03, verify_seconds=0.02, draft_seconds=0.005)
    result = benchmark.efficiency(overall, times, 100, 1.0)
    assert result.possible_speedup == pytest.approx(2.4)
    assert result.efficiency == pytest.approx(2 / 2.4)
    half = benchmark.efficiency(overall, times, 100, 0.5)  # the other half ran as a plain round
    assert half.possible_speedup == pytest.approx(2 * 0.03 / 0.03)


def test_wide_rounds_are_those_whose_draft_does_not_fit():
    metrics = Metrics(num_rounds=10, drafted_per_position=(8, 6, 3))
    sample = Sample(A, {"ngram": Generation((1,), metrics)})
    shares = [benchmark.wide_share([sample], "ngram", width) for width in (1, 2, 3, 4)]
    assert shares == [0.8, 0.6, 0.3, 0.0]


def test_median_context_is_halfway():
    assert benchmark.median_context(SAMPLES) == 15


@pytest.fixture
def engine(monkeypatch):
    """A fake `jspec.llm`; gives the list of (drafter, first token of the prompt) as it ran."""
    calls: list[tuple[str, int]] = []

    class LLM:
        def __init__(self, model, *, drafter, **options):
            self.model = types.SimpleNamespace(eos_token_ids=(6,))
            self.params, self.tokenizer = ("weights", ()), None
            self.drafter = drafter

        def chat_prompt(self, messages):
            return [int(messages[0]["content"])]

        def generate(self, prompts, params):
            calls.append((self.drafter, prompts[0][0]))
            if prompts[0][0] == 99 and len(calls) > 2:
                raise KeyboardInterrupt
            if prompts[0][0] == 98 and len(calls) > 2:
                raise JspecError("too long")
            result = plain(2, 1.0)
            return [types.SimpleNamespace(token_ids=[5, 6], metrics=result.metrics)]

        def measure_round(self, context_length, *, repeats):
            return types.SimpleNamespace(
                plain_seconds=1.0, verify_seconds=1.0, draft_seconds=1.0, plain_width=2
            )

    fake = types.ModuleType("jspec.llm")
    fake.__dict__.update(
        LLM=LLM,
        SamplingParams=lambda **options: options,
        enable_compilation_cache=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "jspec.llm", fake)
    return calls


def numbered(*numbers: int) -> list[Prompt]:
    return [Prompt(str(n), "qa", str(n)) for n in numbers]


SETTINGS = benchmark.Settings(prompts="p.jsonl", model="m", max_tokens=3)


def run(settings: benchmark.Settings, prompts: list[Prompt]) -> benchmark.Report:
    def ignore(label: str, done: int, total: int) -> None:
        pass

    return benchmark.run(settings, prompts, benchmark.load_engines(settings, ignore), ignore)


def test_systems_take_turns_and_the_order_turns_round(engine):
    report = run(SETTINGS, numbered(1, 2))
    warm_up, timed = engine[:2], engine[2:]
    assert warm_up == [(PLAIN, 1), ("ngram", 1)]
    assert timed == [(PLAIN, 1), ("ngram", 1), ("ngram", 2), (PLAIN, 2)]
    assert report.stopped_by is None
    assert benchmark.as_json(report)["complete"] is True


@pytest.mark.parametrize(("number", "kind"), [(99, KeyboardInterrupt), (98, JspecError)])
def test_a_stop_keeps_the_prompts_that_are_whole(engine, number, kind):
    report = run(SETTINGS, numbered(1, number))
    assert isinstance(report.stopped_by, kind)
    assert [sample.prompt.question_id for sample in report.samples] == ["1"]
    assert report.efficiency == {}
    assert benchmark.as_json(report)["complete"] is False


PEER_SOURCE = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["token_ids"] == [13]:
        sys.exit("out of luck")
    if request["token_ids"] == [14]:
        print(json.dumps({"error": "too long"}), flush=True)
        continue
    ids = [5, 6, 0][:request["max_new_tokens"]]
    print(json.dumps({"token_ids": ids, "prefill_seconds": 1, "decode_seconds": 4}), flush=True)
"""


def peer_command(source: str) -> str:
    return shlex.join([sys.executable, "-c", source])


def test_plain_decoding_is_compared_with_the_peer(engine):
    settings = benchmark.Settings("p.jsonl", "m", max_tokens=3, peer=peer_command(PEER_SOURCE))
    report = run(settings, numbered(1))
    (_, overall) = report.comparisons[PEER]
    # The peer's first token is not decoding: 2 tokens in 4 s, ours 2 in 1 s. It goes on past the
    # end token 6, where ours stops: the texts are the same.
    assert (overall.tokens_per_second, overall.baseline_tokens_per_second) == (2.0, 0.5)
    assert (overall.speedup, overall.num_same_text) == (4.0, 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('hello')", "peer: not a JSON object: 'hello'"),
        ("print('{}')", "its first line is not"),
        ("raise SystemExit('no weights')", "peer ended with status 1: no weights"),
    ],
)
def test_a_peer_that_does_not_start(source, message):
    with pytest.raises(JspecError, match=message):
        benchmark.Peer(peer_command(source))


def test_a_peer_that_ends_says_why():
    peer = benchmark.Peer(peer_command(PEER_SOURCE))
    system = benchmark.peer_system(peer, {A: [13]}, 3)
    with pytest.raises(JspecError, match="status 1: out of luck"):
        system(A)
    peer.close()


def test_a_peer_that_declines_is_quoted():
    peer = benchmark.Peer(peer_command(PEER_SOURCE))
    with pytest.raises(JspecError, match="peer: too long"):
        benchmark.peer_system(peer, {A: [14]}, 3)(A)
    peer.close()


def test_a_peer_that_answers_without_figures():
    source = "print('{\"ready\": true}', flush=True)\ninput()\nprint('{}', flush=True)"
    peer = benchmark.Peer(peer_command(source))
    with pytest.raises(JspecError, match="without its figures"):
        benchmark.peer_system(peer, {A: [1]}, 3)(A)
    peer.close()


def test_a_peer_needs_a_command_that_exists():
    for command in ("/no/such/engine", "'unbalanced", ""):
        with pytest.raises(JspecError, match="does not start"):
            benchmark.Peer(command)
