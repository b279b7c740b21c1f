"""The golden files are what `load.py` says they are. Knows nothing of torch or of jspec."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from load import family_cases, layer_cases, smollm2_cases, smollm2_gguf_sha256
from weights import golden_weights

VOCAB_SIZE = 49152


def test_the_default_model_has_five_prompts_of_the_documented_shapes() -> None:
    cases = smollm2_cases()
    assert [case.name for case in cases] == ["chat", "code", "korean", "passage", "table"]
    assert len(smollm2_gguf_sha256()) == 64
    for case in cases:
        T = len(case.token_ids)
        assert case.text
        assert case.top_ids.shape == case.top_logits.shape == (T, 32)
        assert case.logsumexp.shape == (T,)
        assert case.column_ids.shape == (64,)
        assert case.column_logits.shape == (T, 64)
        assert case.greedy_ids.shape == case.greedy_gaps.shape == (64,)
        for logits in (case.top_logits, case.logsumexp, case.column_logits, case.greedy_gaps):
            assert logits.dtype == np.float32
        for ids in (case.token_ids, case.top_ids, case.column_ids, case.greedy_ids):
            assert ids.dtype == np.int32
            assert ids.min() >= 0
            assert ids.max() < VOCAB_SIZE


def test_the_default_model_values_agree_with_each_other() -> None:
    for case in smollm2_cases():
        assert case.top_ids[-1, 0] == case.greedy_ids[0]
        np.testing.assert_allclose(
            case.top_logits[-1, 0] - case.top_logits[-1, 1], case.greedy_gaps[0], atol=1e-4
        )
        assert case.greedy_gaps.min() >= 1e-3
        assert (np.diff(case.top_logits, axis=1) <= 0).all()
        top_mass = np.exp(case.top_logits - case.logsumexp[:, None]).sum(axis=1)
        assert (top_mass < 1 + 1e-5).all()  # rounding of logits near 30, in float32
        assert (top_mass > 0.1).all()
        position, rank = np.nonzero(np.isin(case.top_ids, case.column_ids))
        column = np.searchsorted(case.column_ids, case.top_ids[position, rank])
        np.testing.assert_array_equal(
            case.column_logits[position, column], case.top_logits[position, rank]
        )


def test_tiny_models_have_logits_of_the_documented_shapes() -> None:
    cases = family_cases()
    assert {case.config["model_type"] for case in cases} == {"llama", "mistral", "qwen2", "qwen3"}
    for case in cases:
        assert case.logits.shape == (len(case.token_ids), case.config["vocab_size"])
        assert case.logits.dtype == np.float32
        assert case.token_ids.dtype == np.int32
        names = [name for name, _ in case.names_and_shapes]
        assert names == sorted(names)
        assert ("lm_head.weight" in names) != case.config["tie_word_embeddings"]
        assert case.logits.std() > 1.0


def test_layers_have_inputs_and_outputs_of_the_documented_shapes() -> None:
    cases = layer_cases()
    kinds = {case.config["model_type"] for case in cases}
    assert kinds == {"deepseek_v3", "glm4_moe", "qwen3_next"}
    for case in cases:
        assert case.input.shape == case.output.shape == (24, case.config["hidden_size"])
        assert case.input.dtype == case.output.dtype == np.float32
        names = [name for name, _ in case.names_and_shapes]
        assert names == sorted(names)
        assert (case.output - case.input).std() > 1.0


def test_old_and_new_style_configs_of_one_model_have_the_same_logits() -> None:
    logits = {case.name: case.logits for case in family_cases()}
    for name in ("llama_linear", "llama_llama3"):
        np.testing.assert_array_equal(logits[name], logits[f"{name}_old_style"])


def test_position_scalings_differ_from_each_other() -> None:
    logits = {case.name: case.logits for case in family_cases()}
    same_weights = [logits[f"llama_{kind}"] for kind in ("linear", "dynamic", "llama3", "yarn")]
    for i, one in enumerate(same_weights):
        for other in same_weights[:i]:
            assert np.abs(one - other).max() > 1.0


def test_the_weights_rule_gives_the_values_that_the_logits_were_computed_from() -> None:
    matrix, norm = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"
    weights = golden_weights([(matrix, (32, 32)), (norm, (32,))])
    assert zlib.crc32(weights[matrix].tobytes()) == 1711062154
    assert weights[matrix].dtype == weights[norm].dtype == np.float32
    assert abs(weights[matrix].std() - 0.3) < 0.02  # 1024 draws: the error of a std is 0.007
    assert abs(weights[norm].mean() - 1.0) < 0.06  # 32 draws: the error of the mean is 0.018


def test_the_files_stay_under_two_megabytes() -> None:
    files = [path for path in Path(__file__).parent.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
