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
    "test_data_without_a_validation_part_are_refused",
    "test_it_ends_as_if_it_had_always_been_so_long",
    "test_a_schedule_that_ends_with_its_steps_cannot",
    # Trainings, beside test_it_learns and those that stop and go on.
    "test_eight_devices_and_two_parts_are_one_device",
    "test_remat_and_bfloat16_give_the_same_losses",
    "test_parts_give_the_gradient_of_the_whole_batch",
    "test_equal_heads_stay_equal_and_are_one_head_twice",
    "test_a_fixed_random_pattern_does_not_read_the_text",
    "test_initial_scale_is_the_same_in_every_layout",
    # Whole models, beside the parts that they are made of.
    "test_an_encoder_with_a_decoder_writes_what_the_full_forward_would_choose",
    "test_as_pythia_and_llama_decode",
    "test_layers_that_share_more",
    "test_edits_under_transforms",
    "test_showing_changes_no_bit",
    "test_through_a_model",
    "test_given_positions_are_honoured",
    "test_text_to_text_in_pieces",
    "test_the_step_is_as_long_at_any_depth",
    "test_parts_that_no_format_knows_are_added_up",
    "test_a_model_of_ours_is_written_where_a_format_can_say_it",
    "test_both_stacks_change_together",
    "test_the_gradient_of_a_slot_is_the_sum_over_its_uses",
    "test_a_delta_of_full_rank_takes_any_layers_up_without_loss",
    "test_an_encoder_is_taken_apart_and_tied_again",
    "test_heads_that_are_made_the_same",
    "test_an_encoder_decoder_has_three_attentions",
    "test_keys_of_an_earlier_layer_and_of_another_text",
    "test_curves_beside_random_orders",
    "test_fresh_weights_in_any_precision",
    "test_transforms_of_the_gradient",
    "test_without_remat_the_gradients_are_the_same",
    "test_t5_s_table_is_of_t5_s_functions",
    # Sources, beside text and classes.
    "test_filling_never_counts[pairs]",
    "test_filling_never_counts[grain]",
    "test_filling_never_counts[graph]",
    "test_filling_never_counts[recall]",
    "test_rows_that_are_scored[recall]",
    # Pages and docstrings whose examples make a model, beside the README and all the others.
    "test_the_page_is_what_the_code_makes",
    "test_the_page_for_newcomers_runs",
    "test_code_prints_what_the_page_says[plans.md]",
    "test_code_prints_what_the_page_says[inspect.md]",
    "test_code_prints_what_the_page_says[observe.md]",
    "test_code_prints_what_the_page_says[viewer.md]",
    "test_code_prints_what_the_page_says[howto.md]",
    "test_docstrings[attnlab.sharing.surgery]",
    "test_docstrings[attnlab.inspect.sides]",
    "test_docstrings[attnlab.inspect.diversity]",
    "test_docstrings[attnlab.inspect.writes]",
    "test_docstrings[attnlab.inspect.importance]",
    "test_docstrings[attnlab.model.block]",
    "test_docstrings[attnlab.model.alike]",
}
