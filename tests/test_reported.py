"""Which test holds each fault that users of this server and of others have reported.

A line says what is right. Whoever removes a test of one finds here what it was for.
"""

import re
from pathlib import Path

import pytest

REPORTED: dict[str, tuple[str, ...]] = {
    # A conversation that is sent back.
    "a turn without text, or with null for it, is an empty text": (
        "api/test_sent_back_by_clients.py::test_no_content_is_an_empty_text_in_every_role",
        "api/test_sent_back.py::test_a_model_sees_every_word_of_what_is_sent_back",
    ),
    "a call whose arguments are no JSON object can be sent back": (
        "api/test_sent_back_by_clients.py::test_a_chats_message_is_sent_back_as_it_came",
        "api/test_sent_back_by_clients.py::test_output_items_are_sent_back_as_they_came",
        "api/test_sent_back_by_clients.py::test_blocks_are_sent_back_as_they_came",
    ),
    "a spoken turn, a refusal and an old function call reach the model": (
        "api/test_sent_back.py::test_a_model_sees_every_word_of_what_is_sent_back",
        "api/test_sent_back_by_clients.py::test_an_old_function_call_and_its_result_are_a_tool_call",
        "api/test_sent_back_by_clients.py::test_a_turn_that_cannot_be_said_is_refused_by_name",
    ),
    "a drawn chat's own message can be sent back": (
        "demo/test_pipeline.py::test_a_drawn_message_can_be_sent_back_as_it_came",
        "api/test_sent_back.py::test_a_model_sees_every_word_of_what_is_sent_back",
    ),
    "rows in the reasoning of a turn are rows, and other values a 400": (
        "api/test_sent_back_by_clients.py::test_rows_in_the_reasoning_of_a_past_turn_are_its_text",
        "api/test_enumerated_fields.py::test_a_value_of_any_other_type_is_refused_by_name",
    ),
    "reasoning has all three names in templates": (
        "api/test_sent_back.py::test_a_conversation_has_one_prompt_in_every_api",
        "api/test_sent_back_by_clients.py::test_rows_in_the_reasoning_of_a_past_turn_are_its_text",
    ),
    # Schemas and tools.
    "a parameter has the type of its schema, behind whatever it stands": (
        "render/test_json_schema.py::test_a_value_has_the_type_that_the_schema_gives",
        "render/test_json_schema.py::test_a_parameter_may_be_declared_behind_the_schemas_own_reference",
    ),
    "annotations are ignored, and what cannot be held is named with tool and place": (
        "api/test_tool_definitions.py::test_of_a_strict_tool_all_is_held_or_the_error_names_the_tool_and_the_place",
        "api/test_tool_definitions.py::test_one_tool_among_many_that_is_no_use_does_not_hold_up_the_others",
        "api/test_forced_tools.py::test_a_function_that_is_not_strict_is_held_as_far_as_possible",
    ),
    "several objects in one tag are several calls": (
        "render/test_parsers.py::test_recorded_calls_are_read_whatever_two_pieces_they_come_in",
    ),
    "adapters of older libraries, and with unchanged tables, are taken": (
        "engine/torch/test_vision_engine.py::test_an_adapter_of_the_language_model_decodes_as_pefts_merged_model_does",
        "adapter/test_tables.py::test_tables_that_equal_the_models_are_left_out_and_logged",
        "adapter/test_tables.py::test_a_table_that_was_trained_is_refused_with_the_cure",
        (
            "api/test_adapters.py::test_an_adapter_with_the_models_own_table_is_served"
            "_and_of_a_trained_one_the_cure_is_said"
        ),
    ),
    "chats of embedders have an end token where it is asked for": (
        "api/test_embeddings.py::test_a_chat_has_the_special_tokens_of_a_text_where_they_are_asked_for",
        "api/test_routes.py::test_tokenize_and_detokenize_are_each_others_inverse",
    ),
    # Fields, routes, protocol.
    "no enumerated field fails with a list or an object": (
        "api/test_enumerated_fields.py::test_a_value_of_any_other_type_is_refused_by_name",
        "api/test_enumerated_fields.py::test_every_detail_of_openais_is_taken",
        "api/test_every_field.py::test_a_value_that_is_not_of_a_fields_type_is_refused_by_name",
    ),
    "a seed of -1 is none": (
        "api/test_fields.py::test_a_seed_of_minus_one_is_none_and_others_below_zero_are_seeds",
        "api/test_images_generations.py::test_a_seed_of_minus_one_is_none",
    ),
    "effort and verbosity change nothing where a model has no setting for them": (
        "api/test_responses.py::test_what_agents_say_of_effort_changes_nothing_without_a_setting_for_it",
    ),
    "queries that mean nothing here are ignored": (
        "http/test_paths.py::test_query_parameters_of_other_servers_are_ignored",
        "http/test_paths.py::test_a_client_that_adds_a_query_to_every_request_is_answered",
    ),
    "a prefix of a proxy is known to the description, whether or not it is removed": (
        "http/test_paths.py::test_a_path_is_served_whether_or_not_the_proxy_removes_its_prefix",
        "http/test_paths.py::test_the_description_says_below_which_path_clients_see_it",
    ),
    "a stream to a client of HTTP/1.0 has no chunks": (
        "http/test_http10.py::test_a_stream_is_sent_as_it_is_and_ends_with_the_connection",
    ),
    "what would change an answer is served or refused, never ignored": (
        "api/test_peers_fields.py::test_what_would_change_the_answer_is_refused_by_name",
        "api/test_peers_fields.py::test_no_field_of_vllms_newest_release_is_ignored",
        "api/test_peers_fields.py::test_an_embedding_is_not_of_a_prompt_beside_its_input",
    ),
    "media by uuid alone are refused as such": (
        "api/test_enumerated_fields.py::test_media_that_are_named_by_their_uuid_alone_are_refused_as_such",
    ),
    "as many logprobs as the vocabulary has may be allowed": (
        "api/test_max_logprobs.py::test_all_of_the_vocabulary_may_be_asked_for",
    ),
    "each route of vLLM is served or stands among the differences": (
        "api/test_peers_fields.py::test_each_route_of_vllms_newest_release_is_served_or_a_difference",
    ),
    # Media files.
    "a WAV whose length was never filled in, and tags before any format, are read": (
        "media/test_audio.py::test_a_wav_whose_length_was_never_filled_in_ends_with_the_file",
        "media/test_audio.py::test_tags_before_a_file_of_any_format_are_passed_over",
    ),
    "data: URLs are read as browsers read them": (
        "media/test_fetch.py::test_base64_in_a_data_url_is_read_as_browsers_read_it",
        "fuzz/test_fuzz_media.py::test_mutated_files_are_refused_or_are_what_pillow_says",
    ),
    "errors have a client's words, and no address of an object": (
        "engine/test_reasons.py::test_no_error_of_any_kind_tells_the_address_of_an_object",
        "engine/test_reasons.py::test_an_mp3_of_false_syncs_is_refused_without_the_servers_own_objects",
    ),
    # Time and memory that one client takes from others.
    "a picture costs what its header says": (
        "media/test_image.py::test_scans_of_a_jpeg_are_bounded_by_its_pixels",
        "media/test_image.py::test_what_is_small_and_dear_to_decode_is_refused",
        "engine/torch/test_image_encoder.py::test_a_picture_waits_for_those_that_are_decoded_and_for_no_others_of_a_client",
    ),
    "one word of megabytes is refused before it is tokenized": (
        "render/test_long_text.py::test_one_word_of_megabytes_is_refused_before_it_is_tokenized",
        "render/test_long_text.py::test_tokenizing_ends_when_nobody_waits_for_it",
        "render/test_long_text.py::test_every_way_to_tokenize_reserves_its_memory",
    ),
    "an image costs what its model allows, and long steps end with their client": (
        "engine/test_image_cost.py::test_an_image_far_over_the_models_own_size_is_refused_before_anything_is_computed",
        "engine/test_image_cost.py::test_a_step_of_many_passes_ends_once_nobody_wants_it",
        "stages/test_turns.py::test_one_drawing_of_a_client_waits_for_as_much_of_another_as_it_costs",
    ),
    "what a batch, a conversation or a decision costs is known, and nobody waits for it": (
        "batches/test_lines.py::test_what_stands_in_a_line_is_not_parsed_before_it_is_counted",
        (
            "batches/test_runner.py::"
            "test_a_matrix_that_has_no_room_is_not_written_however_few_of_its_rows_there_are"
        ),
        "batches/test_lines.py::test_others_run_while_a_long_line_is_put_together",
        "state/test_items.py::test_items_of_many_parts_are_looked_at_beside_the_event_loop",
    ),
    "thousands of short texts are prepared beside the event loop": (
        (
            "api/test_comparisons.py::"
            "test_many_short_texts_are_no_small_work_and_are_prepared_a_part_at_a_time"
        ),
    ),
    "a silent stream notices that its reader has left": (
        "http/test_readers_end.py::test_a_reader_that_closes_in_a_silence_is_noticed",
    ),
    "those who wait for pages cost a look-up a step, and short steps": (
        "engine/torch/test_remembered.py::test_a_sequence_that_waits_costs_a_look_up_in_a_step_however_much_of_it_is_cached",
        "engine/torch/test_scheduler.py::test_a_newcomer_waits_for_no_more_than_the_usual_positions_of_a_step",
    ),
    "who leaves takes no result from others who wait for it": (
        "engine/torch/test_image_encoder.py::test_equal_images_are_encoded_once_and_a_cancelled_leader_leaves_no_one_waiting",
        "test_single_flight.py::test_a_cancelled_first_caller_leaves_the_others_their_result",
    ),
    "scrapes and strangers delay nobody": (
        "http/test_engine_metrics.py::test_scrapes_ask_the_workers_twice_a_second_and_are_not_older_than_they_are",
        "transport/test_transport.py::test_strangers_of_one_address_leave_places_to_members",
    ),
    # A fleet.
    "all frontends send a name's requests to the same weights": (
        "router/test_shares.py::test_every_order_of_discovery_gives_the_same_shares",
        "router/test_shares.py::test_a_restarted_worker_of_the_old_weights_does_not_take_them_back",
        "transport/test_nats_rollout.py::test_a_canary_takes_its_share",
    ),
    "a namespace survives an empty store": (
        "transport/test_nats_emptied.py::test_a_running_member_writes_the_secret_back",
        "cli/test_fleet_emptied.py::test_members_that_come_after_the_store_was_emptied_belong_to_the_fleet",
    ),
    "the router wakes nobody from inside what it calls": (
        "router/test_dispatcher.py::test_a_placing_within_another_is_an_error_of_that_request_alone",
        (
            "router/test_rooms.py::"
            "test_a_decode_worker_that_dies_while_a_request_waits_has_no_prompt_sent_for_nothing"
        ),
        "router/test_dispatcher.py::test_a_worker_that_is_gone_is_tried_once_by_all_that_wait",
    ),
    "retired weights and names go": (
        "router/test_retired.py::test_after_many_rollouts_only_the_pool_that_serves_is_left",
        "router/test_retired.py::test_a_model_that_is_gone_is_served_no_more_once_its_time_is_over",
    ),
    "adapters are on workers that come later, and loading again is no error": (
        "transport/test_nats_adapters.py::test_a_rolling_update_loses_no_adapter",
        "api/test_adapters_fleet.py::test_a_worker_that_lacks_it_gets_it_and_the_others_keep_theirs",
    ),
    "a worker that stands still is not well, and a fault of a request is its own": (
        "http/test_health.py::test_a_worker_process_that_stands_still_is_not_well_until_it_goes_on",
        "worker/test_faults.py::test_a_fault_of_one_request_is_its_own_error_and_another_goes_on",
        "engine/embed_conformance.py::test_a_receiver_that_takes_nothing_harms_no_other",
    ),
    "an error that NATS tells ends no connection for good": (
        "transport/test_nats_client.py::test_a_connection_outlives_what_the_server_calls_an_error",
        "transport/test_nats_client.py::test_one_subscription_too_many_ends_no_other",
    ),
    # Those who run it.
    "three servers of NATS form a cluster, and passwords have any characters": (
        "deploy/test_chart_nats.py::test_three_servers_form_a_cluster_and_one_of_them_may_be_lost",
        (
            "deploy/test_chart_nats.py::"
            "test_a_password_of_any_characters_lets_members_in_and_no_other_does"
        ),
        (
            "deploy/test_chart_nats.py::"
            "test_what_one_server_has_stored_moves_to_three_by_backup_and_restore"
        ),
        "deploy/test_chart_nats.py::test_jetstream_leaves_room_on_its_volume",
    ),
    "a worker that is lost fires an alert, and what loses nothing fires none": (
        "deploy/test_watching.py::test_one_of_two_workers_that_is_lost_fires_its_alert",
        (
            "deploy/test_watching.py::"
            "test_a_model_without_a_worker_fires_also_after_the_frontend_was_started_again"
        ),
        "deploy/test_watching.py::test_what_loses_nothing_fires_nothing",
        (
            "cli/test_worker_health.py::"
            "test_a_frozen_worker_fails_its_check_and_one_with_a_stuck_engine_passes"
        ),
    ),
    "certificates are read again as keys are": (
        "http/test_tls.py::test_new_certificates_authorities_and_keys_are_used_without_a_signal",
        "http/test_tls.py::test_a_broken_certificate_leaves_the_old_one_and_is_counted",
    ),
    "scaling asks for what there is, and probes are no requests": (
        "deploy/test_chart.py::test_scaling_asks_for_the_name_that_the_engine_has",
        "deploy/test_chart.py::test_every_query_of_scaling_is_promql",
        (
            "deploy/test_watching.py::"
            "test_rules_take_all_that_clients_ask_for_and_no_probe_for_a_request"
        ),
    ),
    "a backup restores where NATS alone has the secret": (
        "deploy/test_backup.py::test_a_fleet_whose_secret_is_in_nats_alone_is_restored_with_it",
        (
            "deploy/test_compose.py::"
            "test_a_backup_brings_stored_prompts_back_where_nats_has_lost_its_volume"
        ),
        "deploy/test_backup.py::test_kept_responses_are_restored_and_can_be_continued",
    ),
    "commands of pages and runbooks are commands": (
        "deploy/test_commands.py::test_a_command_of_the_pages_is_one",
        "deploy/test_chart_nats.py::test_a_frontends_pod_looks_at_its_fleet_without_a_word",
    ),
    "values of the chart reach what they are for": (
        "deploy/test_chart.py::test_a_volume_of_all_pools_is_mounted_into_workers_and_frontends",
        "deploy/test_chart.py::test_a_pool_without_an_image_gets_one_with_its_engine",
        "deploy/test_chart.py::test_the_way_to_nats_of_ones_own_is_open_and_no_other",
        "deploy/test_chart.py::test_paths_that_leave_the_cluster_are_those_of_clients",
        "deploy/test_chart.py::test_what_users_add_to_pods_is_there",
    ),
    "logs are all JSON, spans and metrics have the usual names, builds differ": (
        "telemetry/test_watching.py::test_every_line_from_start_to_end_is_json_with_a_level",
        (
            "telemetry/test_watching.py::"
            "test_a_server_writes_json_alone_and_its_spans_follow_the_conventions"
        ),
        (
            "telemetry/test_watching.py::"
            "test_metrics_have_vllms_names_and_those_of_its_published_dashboards"
        ),
    ),
    "a stored prompt can be deleted on a full disk": (
        (
            "cli/test_fleet_full.py::"
            "test_a_stored_prompt_can_be_deleted_when_nothing_more_can_be_stored"
        ),
    ),
    # The first day.
    "printed commands install this project": (
        "test_extras.py::test_nothing_tells_anyone_to_install_another_project",
        "test_extras.py::test_the_distribution_of_printed_commands_is_the_projects",
    ),
    "harmless flags of vLLM warn, and the server starts": (
        "cli/test_settings.py::test_harmless_flags_of_vllm_are_said_and_the_server_starts",
        "cli/test_settings.py::test_each_flag_of_vllm_has_one_fate",
    ),
    "a prompt may be the whole context, and each limit names its flag": (
        "http/test_limits.py::test_by_default_a_prompt_may_be_the_whole_context_within_the_budget",
        "http/test_limits.py::test_a_limit_that_refuses_names_its_flag_and_what_is_allowed",
        "api/test_embeddings.py::test_a_server_may_cut_long_texts_of_requests_that_do_not_say",
    ),
}


@pytest.mark.parametrize("right", REPORTED)
def test_what_is_right_has_tests(right: str) -> None:
    for test in REPORTED[right]:
        file, _, name = test.partition("::")
        text = (Path(__file__).parent / file).read_text()
        assert re.search(rf"def {name}\(", text), test
