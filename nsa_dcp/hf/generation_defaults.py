"""What a checkpoint's `generation_config.json` says about generating, as far as greedy generation follows it."""

from pathlib import Path

from nsa_dcp.planning.config_fields import read_json_object, shown

_FILE = "generation_config.json"
# Fields that change what transformers generates greedily, each with the values that change nothing. What is left
# steers sampling, or how an answer is returned.
_CHANGES_TOKENS = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "stop_strings": ([],),
    "max_time": (),
}


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Read the ids that end a generation: those of `generation_config.json`, or of `config.json` where it is absent.

    Args:
        directory: of a checkpoint.

    Returns:
        The ids; none where the checkpoint names none.

    Raises:
        ValueError: the file is not one that transformers reads, or the ids are not integers.
        NotImplementedError: it asks for something that changes the tokens of greedy generation and is not done here.
    """
    from transformers import GenerationConfig

    name = _FILE if (directory / _FILE).exists() else "config.json"
    written = read_json_object(directory / name, name)
    for field, neutral in _CHANGES_TOKENS.items():
        value = written.get(field)
        if value is not None and value not in neutral:
            raise NotImplementedError(
                f"{name} must leave {field} alone, which changes what transformers generates and is not done here, got "
                f"{shown(value)} ({directory})"
            )
    try:
        eos = GenerationConfig.from_pretrained(directory, config_file_name=name, local_files_only=True).eos_token_id
    except Exception as error:  # Whatever a field of the wrong kind meets inside the library.
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} must be one that transformers reads, got {reason} ({directory})") from None
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {shown(eos)} ({directory / name})")
    return frozenset(ids)
