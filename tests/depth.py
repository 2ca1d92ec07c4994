"""Tests that take seconds and guard depth: `pytest -m slow` runs them, the default run does not.

Each has a lighter neighbour that states the plain fact. A name alone means all its cases; a file's
own `@pytest.mark.slow` says the same of a test that was slow from the start.
"""

DEPTH = {
    # Commands, beside the same in one process (test_train.py, test_workdir.py).
    "test_killed_and_started_again",
    "test_it_trains_by_flag",
    "test_a_run_beside_a_folder",
    "test_command_names_what_it_lacks",
    "test_what_cannot_be_pruned_is_told",
    "test_it_ends_as_if_it_had_always_been_so_long",
    "test_a_schedule_that_ends_with_its_steps_cannot",
    # Trainings, beside test_it_learns and those that stop and go on.
    "test_eight_devices_and_two_parts_are_one_device",
    "test_remat_and_bfloat16_give_the_same_losses",
    "test_parts_give_the_gradient_of_the_whole_batch",
    "test_equal_heads_stay_equal_and_are_one_head_twice",
    "test_a_fixed_random_pattern_does_not_read_the_text",
    # Whole models, beside the parts that they are made of.
    "test_as_pythia_and_llama_decode",
    "test_through_a_model",
    "test_parts_that_no_format_knows_are_added_up",
    "test_a_model_of_ours_is_written_where_a_format_can_say_it",
    "test_both_stacks_change_together",
    "test_the_gradient_of_a_group_is_the_sum_over_its_layers",
    "test_a_delta_of_full_rank_takes_any_layers_up_without_loss",
    "test_an_encoder_is_taken_apart_and_tied_again",
    "test_an_encoder_decoder_has_three_attentions",
    "test_keys_of_an_earlier_layer_and_of_another_text",
    "test_curves_beside_random_orders",
    "test_transforms_of_the_gradient",
    "test_without_remat_the_gradients_are_the_same",
    "test_t5_s_table_is_of_t5_s_functions",
    # Sources, beside text and classes.
    "test_padding_never_counts[pairs]",
    "test_padding_never_counts[grain]",
    "test_padding_never_counts[graph]",
    "test_padding_never_counts[recall]",
    "test_rows_that_are_scored[recall]",
    # Pages and docstrings whose examples make a model, beside the README and all the others.
    "test_the_page_is_what_the_code_makes",
    "test_the_page_for_newcomers_runs",
    "test_code_prints_what_the_page_says[reference/plans.md]",
    "test_code_prints_what_the_page_says[reference/published.md]",
    "test_code_prints_what_the_page_says[howto/interpret.md]",
    "test_code_prints_what_the_page_says[reference/activations.md]",
    "test_code_prints_what_the_page_says[howto/viewer.md]",
    "test_docstrings[attnlab.transforms.resharing]",
    "test_docstrings[attnlab.interpret.panels]",
    "test_docstrings[attnlab.interpret.similarity]",
    "test_docstrings[attnlab.interpret.residual]",
    "test_docstrings[attnlab.interpret.importance]",
    "test_docstrings[attnlab.interpret.gates]",
}
