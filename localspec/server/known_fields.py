"""Which fields the objects of a request may have: honoured, ignored for a reason, or refused by name.

A field that is in no table is refused too, with the nearest name that there is: see ``Fields.known``. docs/server.md
has all that is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Known:
    """The fields of one kind of object.

    Attributes:
        honoured: those that are read.
        ignored: those that change nothing here, and why.
        refused: those that cannot be had, and why; null, false, "", [] and ``off`` ask for nothing and pass.
        off: values that ask for nothing, of fields that are refused.
    """

    honoured: frozenset[str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return sorted({*self.honoured, *self.ignored, *self.refused})

    def asks_nothing(self, name: str, value: Any) -> bool:
        """Whether a refused field has a value that asks for nothing."""
        off = self.off.get(name, ())
        if isinstance(value, bool):
            return value in off if True in off else not value
        return value is None or value in ("", []) or any(value == each and each is not True for each in off)


def _known(
    honoured: str,
    *more: Known,
    ignored: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    off: Mapping[str, tuple[Any, ...]] | None = None,
) -> Known:
    """A table: the names that are honoured, reason -> names for the others, and what other tables have."""

    def named(table: Mapping[str, str] | None) -> dict[str, str]:
        return {name: reason for reason, names in (table or {}).items() for name in names.split()}

    names = frozenset(honoured.split()).union(*(each.honoured for each in more))
    all_ignored, all_refused, all_off = named(ignored), named(refused), dict(off or {})
    for each in more:
        all_ignored = {**each.ignored, **all_ignored}
        all_refused = {**each.refused, **all_refused}
        all_off = {**each.off, **all_off}
    all_ignored = {name: why for name, why in all_ignored.items() if name not in names}
    all_refused = {name: why for name, why in all_refused.items() if name not in names and name not in all_ignored}
    return Known(names, all_ignored, all_refused, all_off)


ACCOUNT = "for a provider's accounts, tiers and logs; this server has none"
CACHE = "processed tokens always stay in memory"
OUTSIDE = "cannot be had: nothing leaves this computer"
TEXT_ONLY = "cannot be had: text only"
NO_SAMPLER = "cannot be had: there is no such sampler"
LOADED = "the model was loaded before, with the server's own options"
REPEATED = "part of an answer that is sent back; it says nothing to the model"
STYLE = "chat templates do not use it"

_SAMPLERS = _known(
    "temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty repeat_penalty repeat_last_n "
    "seed logit_bias",
    ignored={
        "sets a sampler that is off": "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base "
        "dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
    },
    refused={
        NO_SAMPLER: "mirostat typical_p typ_p tfs_z top_a dynatemp_range xtc_probability dry_multiplier top_n_sigma "
        "length_penalty min_keep use_beam_search early_stopping",
    },
    off={
        "mirostat": (0,),
        "typical_p": (1,),
        "typ_p": (1,),
        "tfs_z": (1,),
        "top_a": (0,),
        "dynatemp_range": (0,),
        "xtc_probability": (0,),
        "dry_multiplier": (0,),
        "top_n_sigma": (-1, 0),
        "length_penalty": (1,),
        "min_keep": (0,),
    },
)

SHARED = _known("grammar ignore_eos prediction localspec", _SAMPLERS)
"""What all answers have."""

_LOCAL_SERVERS = _known(
    "",
    ignored={
        CACHE: "cache_prompt cache_salt cache_control",
        "the order of the samplers is fixed": "samplers",
        "every answer has its timings and usage": "timings_per_token usage",
        "a name for logs": "request_id",
    },
    refused={
        "cannot be had: send response_format or grammar": "guided_json guided_regex guided_choice guided_grammar "
        "guided_decoding_backend structured_outputs json_schema",
        "cannot be had: send stop, a text": "stop_token_ids bad_words",
        "cannot be had: send logit_bias": "allowed_token_ids",
        "cannot be had: send logprobs": "n_probs post_sampling_probs return_tokens_as_token_ids return_tokens",
        "cannot be had: send localspec.priority": "priority",
        "cannot be had: prompts are not scored": "prompt_logprobs",
        "cannot be had: a prompt that is too long is refused": "truncate_prompt_tokens n_keep",
        "cannot be had: answers have no least length": "min_tokens",
        "cannot be had: stop strings and special tokens are no part of an answer": "include_stop_str_in_output "
        "skip_special_tokens spaces_between_special_tokens",
        "cannot be had: the engine chooses a slot": "id_slot",
        "cannot be had: no adapters are loaded": "lora",
        "cannot be had: the progress of reading is not told": "return_progress",
        "cannot be had here": "logits_processors kv_transfer_params vllm_xargs response_fields",
    },
    off={
        "priority": (0,),
        "n_probs": (0,),
        "min_tokens": (0,),
        "n_keep": (0, -1),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "id_slot": (-1,),
    },
)

_OPENAI = _known(
    "model stop stream stream_options n max_tokens max_completion_tokens n_predict",
    SHARED,
    _LOCAL_SERVERS,
    ignored={ACCOUNT: "user service_tier store metadata safety_identifier"},
)

CHAT = _known(
    "messages tools tool_choice parallel_tool_calls response_format logprobs top_logprobs modalities think "
    "reasoning_effort thinking_budget chat_template_kwargs add_generation_prompt continue_final_message",
    _OPENAI,
    ignored={
        CACHE: "prompt_cache_key prompt_cache_options prompt_cache_retention",
        STYLE: "verbosity",
    },
    refused={
        "is the old form of tools: send tools and tool_choice": "functions",
        "is the old form of tool_choice: send tools and tool_choice": "function_call",
        TEXT_ONLY: "audio mm_processor_kwargs",
        OUTSIDE: "web_search_options moderation",
        "cannot be had: the model's own is used": "chat_template",
        "cannot be had: write them into a message": "documents",
        "cannot be had: the template says which special tokens there are": "add_special_tokens",
        "cannot be had: send reasoning_effort": "reasoning thinking",
        "cannot be had: what was thought is always told apart, as reasoning_content": "include_reasoning "
        "separate_reasoning reasoning_format thinking_forced_open",
        "cannot be had: calls are always told apart": "parse_tool_calls",
        "cannot be had: an answer is what was said after the prompt": "echo",
        "cannot be had: answers are not ranked": "best_of",
        "cannot be had: send messages": "prompt",
    },
    off={
        "include_reasoning": (True,),
        "separate_reasoning": (True,),
        "reasoning_format": ("auto", "deepseek"),
        "parse_tool_calls": (True,),
        "best_of": (1,),
    },
)

COMPLETIONS = _known(
    "prompt suffix echo best_of logprobs response_format",
    _OPENAI,
    refused={
        "cannot be had: a prompt begins as the model's texts do": "add_special_tokens",
        "cannot be had: send them to /v1/chat/completions": "messages tools tool_choice think reasoning_effort "
        "chat_template_kwargs",
    },
    off={"add_special_tokens": (True,), "think": ("off", "auto")},
)

EMBEDDINGS = _known(
    "model input encoding_format dimensions",
    ignored={ACCOUNT: "user"},
    refused={"cannot be had: a text that is too long is refused": "truncate_prompt_tokens"},
)

RESPONSES = _known(
    "model input instructions max_output_tokens metadata parallel_tool_calls previous_response_id reasoning store "
    "stream stream_options text tool_choice tools include thinking_budget chat_template_kwargs stop",
    SHARED,
    ignored={
        ACCOUNT: "user service_tier safety_identifier client_metadata",
        CACHE: "prompt_cache_key prompt_cache_options prompt_cache_retention",
        "all that was sent stays in the prompt": "context_management",
        "there are no tools that run here": "max_tool_calls",
        "for answers in the background; this server has none": "background_options",
        "for images, which are refused": "image",
    },
    refused={
        "cannot be had: send previous_response_id, or the whole input": "conversation",
        "cannot be had: there are no stored prompts": "prompt",
        "cannot be had: answers are not kept beyond their request": "background",
        "cannot be had: log-probabilities are at /v1/chat/completions": "top_logprobs",
        "cannot be had: a prompt that is too long is refused": "truncation",
        OUTSIDE: "moderation access_programs",
    },
    off={"top_logprobs": (0,), "truncation": ("disabled",)},
)

COUNT_TOKENS = _known(
    "model messages system tools tool_choice thinking output_config thinking_budget",
    SHARED,
    ignored={
        ACCOUNT: "user_profile_id workspace_id billing_policy speed betas",
        CACHE: "cache_control",
        "all that was sent stays in the prompt": "context_management",
    },
    refused={OUTSIDE: "mcp_servers", "cannot be had: no conversation is shortened here": "compaction"},
)

MESSAGES = _known(
    "max_tokens stop_sequences stream",
    COUNT_TOKENS,
    ignored={
        ACCOUNT: "metadata service_tier inference_geo diagnostics fallback_credit_token",
        "there is no other model": "fallbacks",
    },
    refused={
        "cannot be had: no code is run here": "container",
        "cannot be had: send the whole conversation": "thread",
    },
)

_OLLAMA = _known(
    "model stream options format think prediction localspec",
    ignored={
        LOADED: "keep_alive",
        "a prompt that is too long is refused": "truncate shift",
    },
    refused={"cannot be had: log-probabilities are at /v1/chat/completions": "logprobs top_logprobs"},
    off={"top_logprobs": (0,)},
)
OLLAMA_CHAT = _known("messages tools", _OLLAMA)
OLLAMA_GENERATE = _known(
    "prompt suffix system raw",
    _OLLAMA,
    refused={
        "cannot be had: the model's own is used": "template",
        "cannot be had: send the conversation to /api/chat": "context",
        TEXT_ONLY: "images",
        "cannot be had: no images are made": "width height steps",
    },
    off={"width": (0,), "height": (0,), "steps": (0,)},
)
OLLAMA_OPTIONS = _known(
    "num_predict stop thinking_budget",
    SHARED,
    ignored={
        LOADED: "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock "
        "embedding_only num_thread num_gqa",
        "a prompt that is too long is refused": "num_keep",
        "Ollama has given it up too": "penalize_newline",
    },
    refused={"cannot be had: the model's own are used": "rope_frequency_base rope_frequency_scale"},
)
OLLAMA_EMBED = _known("model input truncate dimensions", ignored={LOADED: "keep_alive options"})
OLLAMA_EMBEDDINGS = _known("model prompt", ignored={LOADED: "keep_alive options"})
OLLAMA_SHOW = _known("model name", ignored={"the answer is always the same": "verbose"})

INFILL = _known(
    "model input_prefix input_suffix input_extra prompt n_predict samplers id_slot n_indent t_max_predict_ms "
    "response_fields stop stream",
    SHARED,
    ignored={
        CACHE: "cache_prompt",
        "there is one answer": "n_cmpl",
        "the prompt is always read to its end": "t_max_prompt_ms",
        "every answer has its timings and usage": "timings_per_token",
    },
    refused={
        "cannot be had: no adapters are loaded": "lora",
        "cannot be had: log-probabilities are at /v1/completions": "n_probs",
    },
    off={"n_probs": (0,)},
)

# -- objects inside of a request ---------------------------------------------------------------------------------------

LOCALSPEC = _known("draft draft_length off priority")
RESPONSES_STREAM_OPTIONS = _known("", ignored={"events are never padded": "include_obfuscation"})
STREAM_OPTIONS = _known(
    "include_usage localspec_rounds",
    RESPONSES_STREAM_OPTIONS,
    refused={"cannot be had: usage comes at the end": "continuous_usage_stats"},
)
RESPONSE_FORMAT = _known(
    "type json_schema schema name", ignored={"schemas are always followed": "strict", STYLE: "description"}
)
JSON_SCHEMA = _known("name schema", ignored={"schemas are always followed": "strict", STYLE: "description"})
PREDICTION = _known("type content")
PART = _known(
    "type text", ignored={CACHE: "prompt_cache_breakpoint cache_control", REPEATED: "annotations logprobs citations"}
)
REFUSAL_PART = _known("type refusal")

CHAT_MESSAGE = _known(
    "role name content tool_calls tool_call_id reasoning_content reasoning thinking refusal prefix",
    ignored={
        REPEATED: "id annotations parsed reasoning_details provider_specific_fields",
        CACHE: "cache_control",
    },
    refused={"is the old form of tool_calls": "function_call", TEXT_ONLY: "audio images"},
)
TOOL_CALL = _known(
    "id type function", ignored={REPEATED: "index"}, refused={"cannot be had: only functions can be called": "custom"}
)
CALLED_FUNCTION = _known("name arguments", ignored={REPEATED: "index parsed_arguments"})
TOOL = _known(
    "type function", ignored={CACHE: "cache_control"}, refused={"cannot be had: only functions can be called": "custom"}
)
FUNCTION = _known("name description parameters strict")
TOOL_CHOICE = _known("type function allowed_tools", refused={"cannot be had: only functions can be called": "custom"})
ALLOWED_TOOLS = _known("mode tools")

RESPONSES_MESSAGE = _known("type role content", ignored={REPEATED: "id status phase end_turn"})
FUNCTION_CALL = _known("type call_id name arguments", ignored={REPEATED: "id status caller namespace async"})
FUNCTION_CALL_OUTPUT = _known("type call_id output", ignored={REPEATED: "id status caller namespace name"})
REASONING_ITEM = _known(
    "type content summary",
    ignored={REPEATED: "id status", "only the provider that encrypted it can read it": "encrypted_content"},
)
ITEM_REFERENCE = _known("type id")
RESPONSES_TOOL = _known(
    "type name description parameters strict",
    ignored={"the client runs the calls": "async allowed_callers defer_loading output_schema"},
)
RESPONSES_TOOL_CHOICE = _known("type name mode tools")
REASONING = _known(
    "effort", ignored={"thinking is returned as it is": "summary generate_summary context", STYLE: "mode"}
)
TEXT_FORMAT = _known("type name schema", ignored={"schemas are always followed": "strict", STYLE: "description"})
TEXT = _known("format", ignored={STYLE: "verbosity"})

ANTHROPIC_MESSAGE = _known("role content")
TOOL_USE = _known("type id name input", ignored={CACHE: "cache_control", REPEATED: "caller toolset_name"})
TOOL_RESULT = _known("type tool_use_id content is_error", ignored={CACHE: "cache_control", REPEATED: "toolset_name"})
THINKING_BLOCK = _known("type thinking", ignored={REPEATED: "signature"})
REDACTED_THINKING = _known("type", ignored={"only the provider that encrypted it can read it": "data"})
ANTHROPIC_TOOL = _known(
    "type name description input_schema strict",
    ignored={
        CACHE: "cache_control",
        "the client runs the calls": "allowed_callers defer_loading eager_input_streaming",
        STYLE: "input_examples",
    },
)
ANTHROPIC_TOOL_CHOICE = _known("type name disable_parallel_tool_use")
OUTPUT_CONFIG = _known("effort format", refused={"cannot be had: send max_tokens": "task_budget"})
THINKING = _known("type budget_tokens", ignored={"thinking is returned as it is": "display"})
OUTPUT_FORMAT = _known("type schema name")

OLLAMA_MESSAGE = _known("role content thinking tool_calls tool_name tool_call_id", refused={TEXT_ONLY: "images"})
INPUT_EXTRA = _known("filename text", ignored={REPEATED: "time"})
