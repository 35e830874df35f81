"""The tests by which scripts/try_vllm.sh judges a release of vLLM: vllm_tests.py [REPORT]

Without an argument it prints their names. REPORT is what `pytest -rA` printed: of that it prints a table by part, and the
exit code is 1 where a part lacks a test or has one that did not pass. Skipped tests are counted, as they prove nothing.
"""

import re
import sys
from pathlib import Path

SYNC, GENERATION, RUNS = "tests/engine/sharding", "tests/engine/generation", "tests/distributed/trainer"
CHOSEN = {
    "a sync per kind of family": (
        f"{SYNC}/test_sync.py::test_sync_of_random_weights_equals_a_fresh_engine",
        f"{SYNC}/test_sync.py::test_weights_of_experts_are_verified_like_all_others",
        f"{SYNC}/test_vision_sync.py::test_an_engine_reads_images_through_the_weights_it_was_sent",
        f"{SYNC}/test_sync_failures.py::test_a_wrong_byte_on_the_way_is_found",
        f"{SYNC}/test_collective.py::test_patches_leave_a_real_engine_with_the_policys_weights",
    ),
    "LoRA in memory and merged": (
        f"{SYNC}/test_lora_sync.py::test_an_adapter_sent_alone_gives_pefts_log_probabilities",
        f"{SYNC}/test_lora_sync.py::test_merged_copies_give_pefts_log_probabilities",
        f"{SYNC}/test_lora_sync.py::test_adapters_on_a_mixture_are_merged_and_replay_the_engines_routes",
    ),
    "zero copy": (
        f"{SYNC}/test_zero_copy.py::test_new_weights_are_the_engines_without_being_sent",
        f"{SYNC}/test_zero_copy.py::test_an_optimizer_step_is_a_sync_and_a_wrong_byte_is_still_found",
    ),
    "pull": (f"{RUNS}/test_run.py::test_a_run_by_pull_equals_a_staged_one_bit_for_bit",),
    "hybrids": (
        f"{SYNC}/test_hybrid_sync.py::test_an_engine_computes_with_the_decay_of_every_version",
        f"{SYNC}/test_hybrid_sync.py::test_a_model_that_vllm_cannot_start_is_refused_by_name_without_a_traceback",
    ),
    "slices and cuts": (
        f"{GENERATION}/test_slices.py::test_an_answer_in_slices_is_the_uncut_one_bit_for_bit",
        f"{GENERATION}/test_slices.py::test_an_answer_continues_after_a_sleep_and_on_another_engine",
        f"{GENERATION}/test_slices.py::test_each_token_has_the_version_that_sampled_it",
        f"{GENERATION}/test_slices.py::test_rollouts_in_slices_equal_uncut_ones_and_make_as_many_calls",
    ),
    "generation": (
        f"{GENERATION}/test_generation.py::test_logprobs_are_the_trainers_despite_the_models_own_settings",
        f"{GENERATION}/test_generation.py::test_an_answer_depends_on_its_seed_and_not_on_other_requests_or_their_order",
        f"{GENERATION}/test_generation.py::test_settings_that_vllm_refuses_end_in_an_error_message",
        f"{GENERATION}/test_samplers.py::test_a_processor_applies_to_the_requests_that_ask_for_it",
        f"{GENERATION}/test_image_requests.py::test_answers_to_images_have_transformers_log_probabilities",
    ),
    "routes": (
        f"{GENERATION}/test_routes.py::test_routes_are_those_of_a_prefill_even_of_cached_or_preempted_tokens",
        f"{GENERATION}/test_routes.py::test_the_engines_routes_bring_the_trainer_closer_to_it",
    ),
    "server and agents": (
        f"{GENERATION}/test_openai_server.py::test_a_conversation_is_captured_alike_by_every_interface",
        f"{GENERATION}/test_openai_server.py::test_an_unmodified_client_is_captured_exactly",
        f"{GENERATION}/test_openai_server.py::test_tool_calls_are_captured_and_recognised",
        f"{GENERATION}/test_openai_server.py::test_level_6_any_client_is_a_rollout",
        "tests/engine/trainer/test_serve.py::test_a_served_model_answers_as_transformers_does",
        f"{RUNS}/test_agent_run.py::test_episodes_of_several_turns_train_on_two_ranks",
    ),
    "NeMo RL's and TorchRL's interfaces": (
        f"{GENERATION}/compat/test_interface.py::test_greedy_answers_are_those_of_transformers",
        f"{GENERATION}/compat/test_interface.py::test_weights_arrive_by_broadcast_between_sleep_and_generation",
        f"{SYNC}/test_by_hand.py::test_a_policy_updates_nemo_rls_engines",
        f"{GENERATION}/compat/test_async_vllm.py::test_weights_reach_engines_by_broadcast",
        f"{GENERATION}/compat/test_torchrl_client.py::test_tokens_are_scored_as_transformers_scores_them",
    ),
}
"""Part of the table -> its tests, with all their parameters."""


def table(report: str) -> tuple[list[str], bool]:
    """Return a line for each part, and whether all of it passed."""
    found = re.findall(r"(?m)^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+?\.py::\w+)", report)
    skipped = re.findall(r"(?m)^SKIPPED \[\d+\] (\S+?\.py)", report)
    lines, good = [], True
    for part, tests in CHOSEN.items():
        passed = sum(name in tests for result, name in found if result == "PASSED")
        failed = sorted({name for result, name in found if result != "PASSED" and name in tests})
        absent = sorted(set(tests) - {name for _, name in found})
        words = f"{passed} passed"
        words += "".join(f"; failed: {name}" for name in failed)
        words += "".join(f"; did not run: {name}" for name in absent)
        good = good and not failed and not absent
        lines.append(f"{part:36}{words}")
    return lines + ([f"skipped in {', '.join(sorted(set(skipped)))}"] if skipped else []), good


def main(*reports: str) -> int:
    """Print the tests' names, or the table of a report."""
    if not reports:
        print("\n".join(name for tests in CHOSEN.values() for name in tests))
        return 0
    lines, good = table(Path(reports[0]).read_text())
    print("\n".join(lines))
    return not good


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
