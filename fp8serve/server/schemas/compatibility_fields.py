"""Request fields of other APIs that the bodies do not declare, for compatibility with their clients.

A field is mapped to a declared field, ignored because it changes nothing, or refused with an alternative.
`with_compatibility_fields` adds the tables of a route to its body. docs/clients.md contains the tables. All other
undeclared fields are refused as unknown (http/error_handlers.py suggests a name).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import Field, create_model

from fp8serve.server.schemas.bodies import CompatibilityField, Strict

BodyT = TypeVar("BodyT", bound=Strict)


def with_compatibility_fields(*tables: Sequence[CompatibilityField]) -> Callable[[type[BodyT]], type[BodyT]]:
    """Returns a class decorator that adds the fields of `tables` to a body. Fields that the body declares are not
    replaced."""
    rows = {row.name: row for table in tables for row in table}

    def add_fields(body: type[BodyT]) -> type[BodyT]:
        fields: dict[str, Any] = {name: _field(row) for name, row in rows.items() if name not in body.model_fields}
        model = create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields)
        model.COMPATIBILITY_FIELDS = rows
        return model

    return add_fields


def _field(row: CompatibilityField) -> tuple[Any, Any]:
    values = {"enum": [None, *row.neutral_values]} if row.treatment == "refused" else {}
    return Any, Field(None, description=row.description, json_schema_extra={"x-foreign": True, **values})


def mapped(project: str, name: str, to: str) -> CompatibilityField:
    return CompatibilityField(name, project, "mapped", to=to)


def ignored(project: str, name: str, reason: str) -> CompatibilityField:
    return CompatibilityField(name, project, "ignored", note=reason)


def refused(project: str, name: str, alternative: str = "", *neutral_values: Any) -> CompatibilityField:
    """Returns a field that only accepts null and `neutral_values`, which change nothing."""
    return CompatibilityField(name, project, "refused", note=alternative, neutral_values=neutral_values)


PREFIX_CACHING = "Prefix caching is always enabled."
RESPONSE_FORMAT = "Send response_format."
SEPARATE_FIELDS = "Send the options as separate fields: temperature, seed, max_tokens."
REASONING_EFFORT = "Send reasoning_effort."

STORAGE = (
    ignored("OpenAI", "metadata", "Responses are not stored."),
    ignored("OpenAI", "service_tier", "There is one service tier."),
    ignored("OpenAI", "safety_identifier", "Nothing depends on the end user."),
    ignored("OpenAI", "prompt_cache_key", PREFIX_CACHING),
    ignored("OpenAI", "prompt_cache_options", PREFIX_CACHING),
    ignored("OpenAI", "prompt_cache_retention", PREFIX_CACHING),
    refused("OpenAI", "moderation", "Outputs are not moderated."),
)
"""Fields of chat completions and of responses. The response of /v1/responses contains `metadata`."""

SAMPLING = (
    ignored("OpenAI", "user", "Nothing depends on the end user."),
    ignored("vLLM", "session_id", "There is nothing to route."),
    ignored("vLLM", "stream_interval", "Every token is sent at once."),
    ignored("vLLM", "guided_decoding_backend", "There is one backend."),
    refused("vLLM", "use_beam_search", "Send n, or best_of with /v1/completions.", False),
    refused("vLLM", "length_penalty", "There is no beam search.", 1.0),
    refused("vLLM", "allowed_token_ids", "Send structured_outputs, or bad_words.", []),
    refused("vLLM", "logprob_token_ids", "Send top_logprobs with chats or logprobs with completions."),
    refused("vLLM", "spaces_between_special_tokens", "", True),
    refused("vLLM", "truncate_prompt_tokens", "Shorten the prompt, or send truncate to /generate."),
    refused("vLLM", "truncation_side", "Shorten the prompt, or send truncate to /generate."),
    refused("vLLM", "priority", "Requests are scheduled fairly between tenants.", 0),
    refused("vLLM", "request_id", "Send the header X-Request-Id."),
    refused("vLLM", "cache_salt", "The prefix cache is shared by all requests."),
    refused("vLLM", "return_token_offsets", "POST /tokenize returns the tokens of a text.", False),
    refused("vLLM", "return_mm_kwargs", "Input is text.", True),
    refused("vLLM", "routed_experts_prompt_start", "", 0),
    refused("vLLM", "kv_transfer_params"),
    refused("vLLM", "ec_transfer_params"),
    refused("vLLM", "vllm_xargs", "", {}),
    refused("vLLM", "repetition_detection", "Send repetition_penalty, frequency_penalty or presence_penalty."),
    refused("vLLM", "thinking_token_budget", "max_tokens limits reasoning and content together.", -1),
    refused("vLLM", "watermarking", "", False),
    refused("vLLM", "guided_whitespace_pattern"),
    mapped("llama.cpp", "n_predict", "max_tokens"),
    mapped("llama.cpp", "n_cmpl", "n"),
    mapped("llama.cpp", "repeat_penalty", "repetition_penalty"),
    mapped("llama.cpp", "json_schema", "guided_json"),
    ignored("llama.cpp", "sse_ping_interval", "Idle streams get keep-alive comments."),
    ignored("llama.cpp", "cache_prompt", "Prefix caching changes no output."),
    refused("llama.cpp", "n_cache_reuse", PREFIX_CACHING, 0),
    refused("llama.cpp", "n_keep", "Shorten the prompt.", 0),
    refused("llama.cpp", "n_discard", "Shorten the prompt.", 0),
    refused("llama.cpp", "n_indent", "", 0),
    refused("llama.cpp", "n_probs", "Send logprobs and top_logprobs with chats, or logprobs with completions.", 0),
    refused("llama.cpp", "post_sampling_probs", "", False),
    refused("llama.cpp", "min_keep", "", 0),
    refused("llama.cpp", "repeat_last_n", "Penalties apply to the whole text.", -1),
    refused("llama.cpp", "typical_p", "Send top_p or min_p.", 1.0),
    refused("llama.cpp", "dynatemp_range", "Send temperature.", 0.0),
    refused("llama.cpp", "dynatemp_exponent", "Send temperature.", 1.0),
    refused("llama.cpp", "dry_multiplier", "Send repetition_penalty.", 0.0),
    refused("llama.cpp", "xtc_probability", "Send min_p.", 0.0),
    refused("llama.cpp", "mirostat", "Send top_p or min_p.", 0),
    refused("llama.cpp", "samplers", "The order of sampling steps is fixed.", []),
    refused("llama.cpp", "id_slot", "", -1),
    refused("llama.cpp", "lora", "Name the adapter in model.", []),
    refused("llama.cpp", "t_max_predict_ms", "Start the server with --request-seconds.", 0, -1),
    refused("llama.cpp", "timings_per_token", "GET /metrics has the timings.", False),
    refused("llama.cpp", "return_progress", "", False),
    refused("llama.cpp", "return_tokens", "POST /tokenize returns the ids of a text.", False),
    refused("llama.cpp", "response_fields", "", []),
    ignored("Ollama", "keep_alive", "Models stay loaded."),
    mapped("Ollama", "num_predict", "max_tokens"),
    refused("Ollama", "options", SEPARATE_FIELDS, {}),
    refused("Ollama", "num_ctx", "Start the server with --max-model-len."),
    refused("Ollama", "format", RESPONSE_FORMAT, ""),
)
"""Fields of chat completions and of completions."""

CHAT = (
    ignored("OpenAI", "store", "Responses are not stored."),
    refused("OpenAI", "functions", "Send tools.", []),
    refused("OpenAI", "function_call", "Send tool_choice.", "none", "auto"),
    refused("OpenAI", "modalities", "Output is text.", ["text"]),
    refused("OpenAI", "audio", "Output is text."),
    refused("OpenAI", "prediction", "Start the server with --speculative-tokens."),
    refused("OpenAI", "web_search_options", "Declare a tool that searches."),
    refused("OpenAI", "verbosity", "Ask for it in a system message.", "medium"),
    refused("vLLM", "best_of", "Send n.", 1),
    refused("vLLM", "echo", "The client knows the last message.", False),
    refused("vLLM", "add_special_tokens", "The chat template adds special tokens.", False),
    refused("vLLM", "chat_template", "Add chat_template.jinja to the model."),
    refused("vLLM", "media_io_kwargs", "Input is text.", {}),
    refused("vLLM", "mm_processor_kwargs", "Input is text.", {}),
    refused("vLLM", "include_reasoning", "Reasoning is always returned in reasoning_content.", True),
    refused("vLLM", "return_prompt_text", "POST /tokenize with return_token_strs returns the prompt.", False),
    refused("huggingface_hub", "tool_prompt", "Send a system message."),
    refused("llama.cpp", "reasoning_format", "Start the server with --reasoning-parser.", "auto", "deepseek"),
    refused("llama.cpp", "parse_tool_calls", "Start the server with --tool-parser.", True),
    refused("Ollama", "think", REASONING_EFFORT),
    refused("Ollama", "reasoning", REASONING_EFFORT, {}),
    refused("others", "enable_thinking", REASONING_EFFORT),
)

COMPLETION = (
    refused("OpenAI", "suffix", "Write the suffix into the prompt.", ""),
    refused("vLLM", "add_special_tokens", "Send the prompt as token ids.", True),
    refused("vLLM", "prompt_embeds", "Send the prompt as a text or as token ids."),
    refused("Ollama", "raw", "Prompts never get a chat template.", True),
)

RESPONSES = (
    ignored("OpenAI", "store", "Responses are not stored."),
    ignored("OpenAI", "user", "Nothing depends on the end user; the response repeats the value."),
    refused("OpenAI", "access_programs"),
    refused("OpenAI", "background", "Wait for the response, or send stream.", False),
    refused("OpenAI", "background_options", "Wait for the response, or send stream."),
    refused("OpenAI", "context_management", "Send a shorter input.", []),
    refused("OpenAI", "conversation", "Send the whole conversation as input."),
    refused("OpenAI", "prompt", "Send input and instructions."),
    refused("OpenAI", "image", "Input and output are text."),
    refused("OpenAI", "max_tool_calls", "The client runs the tools and can count their calls."),
    refused("OpenAI", "truncation", "Send a shorter input.", "disabled"),
    refused("OpenAI", "top_logprobs", "Send the request to /v1/chat/completions.", 0),
)

MESSAGES = (
    ignored("Anthropic", "metadata", "Nothing depends on the end user."),
    ignored("Anthropic", "service_tier", "There is one service tier."),
    ignored("Anthropic", "cache_control", PREFIX_CACHING),
    ignored("Anthropic", "betas", "Features are enabled by their fields."),
    ignored("Anthropic", "user_profile_id", "Nothing depends on the end user."),
    ignored("Anthropic", "workspace_id", "There are no workspaces; keys belong to tenants."),
    ignored("Anthropic", "billing_policy", "Nothing is billed."),
    ignored("Anthropic", "fallback_credit_token", "Nothing is billed."),
    refused("Anthropic", "container", "Declare a tool that runs code."),
    refused("Anthropic", "mcp_servers", "Declare the servers' tools in tools.", []),
    refused("Anthropic", "compaction", "Send a shorter conversation."),
    refused("Anthropic", "context_management", "Send a shorter conversation.", {}),
    refused("Anthropic", "diagnostics", "GET /requests lists active requests."),
    refused("Anthropic", "fallbacks", "Send the request again with another model.", []),
    refused("Anthropic", "inference_geo", "Inference runs where this server runs."),
    refused("Anthropic", "speed", "There is one service tier.", "standard"),
    refused("Anthropic", "thread", "Nothing is stored: send the whole conversation."),
    refused("Anthropic", "output_format", "Send output_config.format."),
)
