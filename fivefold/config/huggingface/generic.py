"""Fields that the config.json of any model family may have."""

from fivefold.config.huggingface.reader import Reader


def read_generic(reader: Reader) -> None:
    """Read fields that transformers writes for all models: without effect, or with fixed values."""
    reader.without_effect(*WITHOUT_EFFECT)
    reader.fixed("is_causal", True)
    reader.fixed("is_encoder_decoder", False)
    reader.fixed("add_cross_attention", False)
    reader.fixed("cross_attention_hidden_size", None)
    reader.fixed("tie_encoder_decoder", False)
    reader.fixed("torchscript", False, why="it unties embeddings that are tied")
    reader.fixed("pruned_heads", {}, None)


def read_stored_weights(reader: Reader, *, code: bool = False, rounded: bool = False) -> None:
    """Read fields about the code and weights stored next to config.json.

    Args:
        reader: reader of the file.
        code: whether the family itself was published with code of its own, so that its config.json
            describes the architecture known by its name.
        rounded: whether it was published with rounded weights, which are widened as they are read.
    """
    if code:
        reader.without_effect("auto_map")
    else:
        why = "it names code of its own, which may compute otherwise"
        reader.fixed("auto_map", None, {}, why=why)
    if rounded:
        reader.without_effect("quantization_config")
    else:
        why = "it rounds weights and activations; without it the model is described unrounded"
        reader.fixed("quantization_config", None, {}, why=why)


def read_balancing(reader: Reader) -> None:
    """Read coefficients of balancing losses, which affect training only."""
    reader.without_effect("output_router_logits", "router_aux_loss_coef")


def refuse_shared_keys(reader: Reader, heads: int, default: int | None) -> None:
    """Report key heads that several query heads share, where each has keys of its own."""
    found = reader.optional_size("num_key_value_heads", default=default)
    if found not in (None, heads):
        why = f"each of num_attention_heads {heads} has keys of its own"
        reader.unsupported("num_key_value_heads", found, [heads], why)


def refuse_one_expert(reader: Reader, chosen: int) -> None:
    """Report one expert a token, of routers that divide sigmoids by the sum of those chosen."""
    if chosen == 1:
        why = "its weight would be normalised to 1"
        reader.unsupported("num_experts_per_tok", chosen, [2], why)


_OF_FILES = """
    _name_or_path name_or_path _commit_hash transformers_version architectures torch_dtype dtype
    use_bfloat16 tf_legacy_loss xla_device _attn_implementation_autoset attn_implementation
    _attn_implementation _attn_implementation_internal experts_implementation
    _experts_implementation _experts_implementation_internal custom_pipelines
    transformers.js_config
"""
_OF_OUTPUTS = """
    use_cache return_dict output_attentions output_hidden_states output_past chunk_size_feed_forward
    gradient_checkpointing is_decoder pretraining_tp
"""
_OF_TOKENS = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class
    prefix
"""
_OF_CLASSIFIERS = """
    id2label label2id num_labels _num_labels problem_type classifier_dropout finetuning_task
    task_specific_params
"""
_OF_GENERATION = """
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens assistant_confidence_threshold assistant_lookbehind target_lookbehind
    num_assistant_tokens num_assistant_tokens_schedule
"""
WITHOUT_EFFECT = tuple(
    f"{_OF_FILES} {_OF_OUTPUTS} {_OF_TOKENS} {_OF_CLASSIFIERS} {_OF_GENERATION}".split()
)
