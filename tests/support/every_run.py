"""Which cases of costly tests are in every run. The rest is `slow`: `make test-all` runs it.

A case is here because it costs seconds (it builds or trains something of its own), and because neither a planted error nor a
family × draft × engine needs it (`tests/contract/test_selection.py`). Tables whose products are cut by rule mark their own
cases (`pairs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pytest

FAMILIES = r"^(?!.*two-cuts)(?!.*float16)|^llama-two-cuts|^t5-float16$"
"""Bundles that other tests build in any case."""

KEPT: dict[str, int | str] = {
    "contract/test_device.py::test_a_device_changes_logits_itself": 1,
    "contract/test_device.py::test_attention_over_exit_rows_is_a_part_of_the_cycle": 1,
    "contract/test_device.py::test_the_host_waits_once_for_a_cycle": 1,
    "contract/test_graphs.py::test_every_declared_input_is_consumed": FAMILIES,
    "contract/test_graphs.py::test_plain_operators_and_explicit_masks_only": FAMILIES,
    "contract/test_graphs.py::test_tensorrt_builds_every_graph": 1,
    "contract/test_graphs.py::test_tensorrt_updates_caches_in_place_and_fuses_attention": 1,
    "contract/test_linear_attention.py::test_batch_equals_generate": 8,
    "contract/test_linear_attention.py::test_contract": 8,
    "contract/test_linear_attention.py::test_greedy_equals_generate": 8,
    "contract/test_lowered_plans.py::test_every_graph_gets_a_portable_plan": 1,
    "contract/test_lowering.py::test_every_graph_is_valid_and_of_listed_operators": FAMILIES,
    "contract/test_native_plans.py::test_every_graph_gets_a_native_plan": 1,
    "contract/test_native_plans.py::test_weights_are_in_a_plan_once": 0,
    "integration/project/test_fuzz_campaign.py::test_memory_of_the_process_that_forks_does_not_count": 0,
    "integration/project/test_fuzz_campaign.py::test_sample_cases_of_every_kind_pass": 0,
    "integration/project/test_fuzz_campaign.py::test_waiting_for_cpu_is_not_a_hang": 0,
    "integration/project/test_kill_campaign.py::test_careless_writer_is_detected": 1,
    "integration/project/test_kill_campaign.py::test_sample_kills_of_every_command": 0,
    "integration/project/test_tables.py::test_tables_of_commands_on_a_bundle": 0,
    "integration/published/test_published.py::test_a_published_layout_builds_or_is_refused_by_name": (
        r"^(?!google--flan-t5-base|google--gemma-3-4b|google--paligemma2-3b-pt|LiquidAI--LFM2-VL-450M$"
        r"|Salesforce--blip2-flan-t5-xl$|llava-hf--llava-v1.6|llava-hf--llava-1.5-7b-hf$|nlpconnect"
        r"|Qwen--Qwen2-VL|Qwen--Qwen3-VL-2B|OpenGVLab--InternVL3-1B-hf|HuggingFaceM4)"
    ),
    "integration/published/test_published_drafts.py::test_a_published_draft_changes_no_token_or_is_refused": (
        r"^(yuhuili--EAGLE-Qwen2-7B|JLKang--ViSpec-llava)"
    ),
    "recipes/test_smollm2_llava_training.py": 1,
    "recipes/test_tiny_model_recipe.py::test_a_resumed_vision_stage_is_the_uninterrupted_one": 0,
    "recipes/test_tiny_model_training.py": 1,
    "recipes/test_tiny_qwen2_5_vl_training.py": 2,
    "recipes/test_tiny_smolvlm2_training.py": 2,
    "recipes/test_tiny_vit_gpt2_training.py": 1,
    "unit/calibration/test_answer_scores.py::test_a_package_folder_that_cannot_be_written_to_costs_the_tokenizer_only": 0,
    "unit/calibration/test_answer_scores.py::test_choices_read_one_picture_and_one_prompt": 8,
    "unit/calibration/test_bundled_models.py::test_a_recipe_and_eval_measure_the_same": 1,
    "unit/calibration/test_bundled_models.py::test_bundled_model_reads_pictures_with_calibrated_confidence": 1,
    "unit/calibration/test_distributed_training.py": 0,
    "unit/calibration/test_eagle3_training.py::test_figures_are_those_of_the_runtime": 1,
    "unit/calibration/test_eagle_training.py::test_a_trained_layer_is_built_and_drafts_as_eval_says": 1,
    "unit/calibration/test_generation.py::test_answers_are_greedy_and_independent_of_the_batch": 8,
    "unit/calibration/test_generation.py::test_the_runtime_answers_like_pytorch": 1,
    "unit/calibration/test_imitation_attention.py::test_a_trained_network_is_built_and_drafts_as_eval_says": 1,
    "unit/calibration/test_imitation_joint.py::test_a_killed_run_ends_with_the_same_bits": 1,
    "unit/calibration/test_medusa_joint.py::test_a_killed_run_ends_with_the_same_bits": 1,
    "unit/calibration/test_medusa_joint.py::test_its_bundle_is_lossless_and_says_that_it_changed": 1,
    "unit/calibration/test_medusa_joint.py::test_only_the_decoder_learns_after_the_heads_were_warmed_up": 8,
    "unit/calibration/test_medusa_joint.py::test_the_loss_is_the_targets_own_and_the_heads_apart": 4,
    "unit/calibration/test_medusa_training.py::test_a_trained_draft_is_built_and_drafts": 2,
    "unit/calibration/test_medusa_training.py::test_hits_are_those_of_trees": 3,
    "unit/calibration/test_placed_training.py::test_figures_are_those_of_the_runtime": 0,
    "unit/calibration/test_scene_films.py::test_no_single_frame_answers_a_question": 0,
    "unit/calibration/test_scene_texts.py::test_different_draws_give_different_texts": 0,
    "unit/calibration/test_scene_texts.py::test_text_alone_predicts_few_tokens": 0,
    "unit/calibration/test_search.py::test_chains_equal_the_model_without_sublayers": 8,
    "unit/calibration/test_training.py::test_a_cosine_that_moves_its_target_leaves_the_last_rows": 1,
    "unit/calibration/test_training.py::test_a_killed_run_ends_with_the_same_weights": 3,
    "unit/calibration/test_training.py::test_every_kind_learns_resumes_exactly_and_comes_back": 5,
    "unit/calibration/test_training.py::test_training_lowers_the_loss_and_not_one_bit_of_the_target_changes": 3,
    "unit/exporter/test_blip2_graphs.py::test_vision": 1,
    "unit/exporter/test_clip_llama.py::test_a_layer_of_another_width_is_one_line": 0,
    "unit/exporter/test_clip_llama.py::test_the_parts_become_a_bundle_that_speaks_like_transformers": 0,
    "unit/exporter/test_dry_run.py::test_the_plan_is_what_the_build_writes": r"blip2-t5",
    "unit/exporter/test_dynamic_resolution.py::test_max_pixels_makes_pictures_and_frames_smaller": 0,
    "unit/exporter/test_eagle3_checkpoint.py::test_eagle3_round_trip_through_a_bundle": 0,
    "unit/exporter/test_eagle_checkpoint.py::test_a_published_checkpoint_becomes_a_draft": 1,
    "unit/exporter/test_exit_attention.py::test_parity_finds_a_wrong_graph": 1,
    "unit/exporter/test_fit.py::test_bytes_are_those_of_files_and_buffers": 1,
    "unit/exporter/test_hub.py::test_a_build_is_refused_before_shards_are_fetched": 0,
    "unit/exporter/test_hub.py::test_a_damaged_header_is_one_line": 0,
    "unit/exporter/test_hub.py::test_a_dry_run_fetches_headers_only": 0,
    "unit/exporter/test_image_tiles.py::test_the_manifest_knows_the_tiles_and_the_most_rows": 1,
    "unit/exporter/test_interrupted_compile.py::test_compile_ends_within_a_graph": 1,
    "unit/exporter/test_kept_traces.py::test_a_key_has_the_same_name_in_every_process": 0,
    "unit/exporter/test_link_weights.py::test_a_linked_bundle_computes_what_another_does": 1,
    "unit/exporter/test_medusa_checkpoint.py::test_a_published_checkpoint_becomes_a_draft": 2,
    "unit/exporter/test_model_options.py::test_dynamic_rope_scales_nothing_up_to_the_last_position": 0,
    "unit/exporter/test_model_options.py::test_llama": 2,
    "unit/exporter/test_model_options.py::test_t5": 1,
    "unit/exporter/test_optimum.py::test_errors_are_those_of_build": 1,
    "unit/exporter/test_paligemma.py::test_a_soft_cap_left_out_is_found_by_parity": 1,
    "unit/exporter/test_parity.py::test_graphs_with_other_options_pass": 1,
    "unit/exporter/test_precision.py::test_parity_layer_by_layer": 1,
    "unit/exporter/test_precision.py::test_tokens_are_those_of_float32_on_rounded_weights": 2,
    "unit/exporter/test_published_rules.py::test_a_refusal_is_one_line_whatever_transformers_warns_of": 0,
    "unit/exporter/test_request_sweep.py::test_requests_are_answered_as_transformers_does": 1,
    "unit/exporter/test_tensorrt_plans.py::test_every_graph_gets_a_plan": 1,
    "unit/exporter/test_tensorrt_plans.py::test_plans_of_a_bundle_whose_weights_are_the_checkpoints_files": 0,
    "unit/exporter/test_tensorrt_zero_points.py::test_a_checkpoint_with_zero_points_gets_plans": 1,
    "unit/runtime/test_conversation.py::test_later_turn_has_the_same_answer_with_every_draft": 4,
    "unit/runtime/test_decoding_cycle.py::test_forced_acceptance_reaches_the_rate": 0,
    "unit/runtime/test_qwen3_vl.py::test_the_table_is_resampled_as_transformers_does": r"^5$",
    "unit/runtime/test_session.py::test_every_draft_gives_the_plain_tokens": 2,
    "unit/runtime/test_session.py::test_memory_does_not_grow": 1,
    "unit/runtime/test_template_bounds.py::test_operations_over_values_cost_budget": 16,
    "unit/runtime/test_tokenizer_bounds.py::test_unbounded_tokenizer_steps_are_refused": 8,
}
"""File below tests/, with or without `::test` → how many of the cases every run has, evenly spread, or a pattern of their ids."""


ALIKE = ("internvl", "lfm2-vl", "llava", "llava-next", "qwen2", "qwen2-vl", "qwen3", "smolvlm", "t5-text")
"""Families whose decoder is another's, behind a tower of their own or none."""

_OF_ALIKE = re.compile(rf"({'|'.join(ALIKE)})(-(float16|bfloat16|int|weights|two-cuts).*)?")
"""Their bundles."""

WITH_ALIKE = (
    "contract/test_contract.py",
    "contract/test_lossless.py",
    "contract/test_mutants.py",
    "contract/test_vispec.py",
    "unit/calibration/test_training.py",
    "unit/calibration/test_vispec_training.py",
)
"""What every run has of `ALIKE` in the contract suite and of calibration, on ONNX Runtime and in float32: the rest is the
decoder's, which another family proves."""


def is_anothers(file: str, params: Mapping[str, object]) -> bool:
    """Whether a case of a test in `file` with these parameters is one of `ALIKE` that `make test-all` runs alone."""
    names = [str(value) for value in params.values() if _OF_ALIKE.fullmatch(str(value))]
    if not names or not file.startswith(("contract/", "unit/calibration/")):
        return False
    narrow = any("-weights-" in name or "float16" in name for name in names)
    return narrow or file not in WITH_ALIKE or params.get("engine", "onnxruntime") != "onnxruntime"


def mark_the_rest_slow(items: Iterable[pytest.Item], root: str) -> None:
    """Give `slow` to the cases of `KEPT` and of `ALIKE` that are not in every run. `root`: the folder tests/ with a slash at
    its end."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = str(item.path).removeprefix(root)
        if is_anothers(file, getattr(getattr(item, "callspec", None), "params", {})):
            item.add_marker(pytest.mark.slow)
        name = f"{file}::{getattr(item, 'originalname', item.name)}"
        key = name if name in KEPT else file
        if key in KEPT and item.get_closest_marker("slow") is None:
            cases.setdefault(key, []).append(item)
    for key, found in cases.items():
        kept = KEPT[key]
        for number, item in enumerate(found):
            if isinstance(kept, str):
                stays = re.search(kept, item.name.partition("[")[2].rstrip("]")) is not None
            else:
                stays = number * kept // len(found) != (number - 1) * kept // len(found)
            if not stays:
                item.add_marker(pytest.mark.slow)
