"""Fields of other projects' requests that this server does not take as they are: one table for each route.

A field is mapped to one of ours, ignored because nothing would change, or refused with what to send instead. A body
declares all other fields itself. `with_foreign_fields` makes a body of a table's rows and docs/clients.md shows them:
a test compares. A field in no table is refused as unknown (http/error_handlers.py suggests a name).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field, create_model

from fp8serve.server.schemas.bodies import ForeignField, Strict

Body = TypeVar("Body", bound=Strict)
Treatment = Literal["mapped", "ignored", "refused"]


def with_foreign_fields(*tables: Sequence[ForeignField]) -> Callable[[type[Body]], type[Body]]:
    """Adds the fields of `tables` to a body. A field that the body declares itself keeps its type."""
    rows = {row.name: row for table in tables for row in table}

    def derive(body: type[Body]) -> type[Body]:
        added: dict[str, Any] = {name: _field(row) for name, row in rows.items() if name not in body.model_fields}
        extended = create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)
        extended.FOREIGN = rows
        return extended

    return derive


def _field(row: ForeignField) -> tuple[Any, Any]:
    values = {"enum": [None, *row.harmless]} if row.treatment == "refused" else {}
    return Any, Field(None, description=row.sentence, json_schema_extra={"x-foreign": True, **values})


def mapped(project: str, name: str, to: str) -> ForeignField:
    return ForeignField(name, project, "mapped", to=to)


def ignored(project: str, name: str, why: str) -> ForeignField:
    return ForeignField(name, project, "ignored", note=why)


def refused(project: str, name: str, instead: str = "", *harmless: Any) -> ForeignField:
    """`harmless`: values that ask for nothing, as null does."""
    return ForeignField(name, project, "refused", note=instead, harmless=harmless)


CACHED = "Equal beginnings of prompts are always computed once."
FORM = "Send response_format."
ITS_OWN = "Send the options as fields of their own: temperature, seed, max_tokens."
THINKING = "Send reasoning_effort."

STORED = (
    ignored("OpenAI", "metadata", "Answers are not stored."),
    ignored("OpenAI", "service_tier", "All requests are served alike."),
    ignored("OpenAI", "safety_identifier", "Nothing depends on the end user."),
    ignored("OpenAI", "prompt_cache_key", CACHED),
    ignored("OpenAI", "prompt_cache_options", CACHED),
    ignored("OpenAI", "prompt_cache_retention", CACHED),
    refused("OpenAI", "moderation", "Answers are not moderated."),
)
"""Of chats and responses. /v1/responses repeats `metadata`."""

SAMPLED = (
    ignored("OpenAI", "user", "Nothing depends on the end user."),
    ignored("vLLM", "session_id", "Requests need no routing."),
    ignored("vLLM", "stream_interval", "Every token is sent as it comes."),
    ignored("vLLM", "guided_decoding_backend", "There is one backend."),
    refused("vLLM", "use_beam_search", "Send n, or best_of with /v1/completions.", False),
    refused("vLLM", "length_penalty", "There is no beam search.", 1.0),
    refused("vLLM", "allowed_token_ids", "Send structured_outputs, or bad_words.", []),
    refused("vLLM", "logprob_token_ids", "Send top_logprobs with chats or logprobs with completions."),
    refused("vLLM", "spaces_between_special_tokens", "", True),
    refused("vLLM", "truncate_prompt_tokens", "Shorten the prompt, or send truncate to /generate."),
    refused("vLLM", "truncation_side", "Shorten the prompt, or send truncate to /generate."),
    refused("vLLM", "priority", "Tenants and their requests take turns.", 0),
    refused("vLLM", "request_id", "Send the header X-Request-Id."),
    refused("vLLM", "cache_salt", "The prefix cache is shared by all requests."),
    refused("vLLM", "return_tokens_as_token_ids", "POST /tokenize gives the ids of a text.", False),
    refused("vLLM", "return_token_ids", "POST /tokenize gives the ids of a text.", False),
    refused("vLLM", "return_token_offsets", "POST /tokenize gives the tokens of a text.", False),
    refused("vLLM", "return_mm_kwargs", "Only text is read.", True),
    refused("vLLM", "routed_experts_prompt_start", "", 0),
    refused("vLLM", "kv_transfer_params"),
    refused("vLLM", "ec_transfer_params"),
    refused("vLLM", "vllm_xargs", "", {}),
    refused("vLLM", "repetition_detection", "Send repetition_penalty, frequency_penalty or presence_penalty."),
    refused("vLLM", "thinking_token_budget", "max_tokens bounds thinking and answer together.", -1),
    refused("vLLM", "watermarking", "", False),
    refused("vLLM", "guided_whitespace_pattern"),
    mapped("llama.cpp", "n_predict", "max_tokens"),
    mapped("llama.cpp", "n_cmpl", "n"),
    mapped("llama.cpp", "repeat_penalty", "repetition_penalty"),
    mapped("llama.cpp", "json_schema", "guided_json"),
    ignored("llama.cpp", "sse_ping_interval", "Comments keep a silent stream open."),
    ignored("llama.cpp", "cache_prompt", "The cache changes no answer."),
    refused("llama.cpp", "n_cache_reuse", CACHED, 0),
    refused("llama.cpp", "n_keep", "Shorten the prompt.", 0),
    refused("llama.cpp", "n_discard", "Shorten the prompt.", 0),
    refused("llama.cpp", "n_indent", "", 0),
    refused("llama.cpp", "n_probs", "Send logprobs and top_logprobs with chats, or logprobs with completions.", 0),
    refused("llama.cpp", "post_sampling_probs", "", False),
    refused("llama.cpp", "min_keep", "", 0),
    refused("llama.cpp", "repeat_last_n", "Penalties consider the whole text.", -1),
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
    refused("llama.cpp", "timings_per_token", "GET /metrics has the times.", False),
    refused("llama.cpp", "return_progress", "", False),
    refused("llama.cpp", "return_tokens", "POST /tokenize gives the ids of a text.", False),
    refused("llama.cpp", "response_fields", "", []),
    ignored("Ollama", "keep_alive", "Models stay loaded."),
    mapped("Ollama", "num_predict", "max_tokens"),
    refused("Ollama", "options", ITS_OWN, {}),
    refused("Ollama", "num_ctx", "Start the server with --max-model-len."),
    refused("Ollama", "format", FORM, ""),
)
"""Of chats and completions."""

CHAT = (
    ignored("OpenAI", "store", "Answers are not stored."),
    refused("OpenAI", "functions", "Send tools.", []),
    refused("OpenAI", "function_call", "Send tool_choice.", "none", "auto"),
    refused("OpenAI", "modalities", "Answers are text.", ["text"]),
    refused("OpenAI", "audio", "Answers are text."),
    refused("OpenAI", "prediction", "Start the server with --speculative-tokens."),
    refused("OpenAI", "web_search_options", "Offer a tool that searches."),
    refused("OpenAI", "verbosity", "Ask for it in a system message.", "medium"),
    refused("vLLM", "best_of", "Send n.", 1),
    refused("vLLM", "echo", "The client has the last message.", False),
    refused("vLLM", "add_special_tokens", "The chat template writes them.", False),
    refused("vLLM", "chat_template", "Add chat_template.jinja to the model."),
    refused("vLLM", "media_io_kwargs", "Only text is read.", {}),
    refused("vLLM", "mm_processor_kwargs", "Only text is read.", {}),
    refused("vLLM", "include_reasoning", "Reasoning is apart, in reasoning_content.", True),
    refused("vLLM", "return_prompt_text", "POST /tokenize with return_token_strs shows the prompt.", False),
    refused("text-generation-inference", "tool_prompt", "Send a system message."),
    refused("text-generation-inference", "guideline", "Send a system message."),
    refused("llama.cpp", "reasoning_format", "Start the server with --reasoning-parser.", "auto", "deepseek"),
    refused("llama.cpp", "parse_tool_calls", "Start the server with --tool-parser.", True),
    refused("Ollama", "think", THINKING),
    refused("Ollama", "reasoning", THINKING, {}),
    refused("others", "enable_thinking", THINKING),
)

COMPLETION = (
    refused("OpenAI", "suffix", "Write the end of the text into the prompt.", ""),
    refused("vLLM", "add_special_tokens", "Send the prompt as token ids.", True),
    refused("vLLM", "prompt_embeds", "Send the prompt as a text or as token ids."),
    refused("Ollama", "raw", "A prompt is never put into a template.", True),
)

RESPONSES = (
    ignored("OpenAI", "store", "Answers are not stored."),
    ignored("OpenAI", "user", "Nothing depends on the end user; it is repeated."),
    refused("OpenAI", "access_programs"),
    refused("OpenAI", "background", "Wait for the answer, or send stream.", False),
    refused("OpenAI", "background_options", "Wait for the answer, or send stream."),
    refused("OpenAI", "context_management", "Send a shorter input.", []),
    refused("OpenAI", "conversation", "Send the whole conversation as input."),
    refused("OpenAI", "prompt", "Send input and instructions."),
    refused("OpenAI", "image", "Only text is read and written."),
    refused("OpenAI", "max_tool_calls", "The tools are the client's, who counts their calls."),
    refused("OpenAI", "truncation", "Send a shorter input.", "disabled"),
    refused("OpenAI", "top_logprobs", "Send the request to /v1/chat/completions.", 0),
)

MESSAGES = (
    ignored("Anthropic", "metadata", "Nothing depends on the end user."),
    ignored("Anthropic", "service_tier", "All requests are served alike."),
    ignored("Anthropic", "cache_control", CACHED),
    ignored("Anthropic", "betas", "Features are asked for by their fields."),
    ignored("Anthropic", "user_profile_id", "Nothing depends on the end user."),
    ignored("Anthropic", "workspace_id", "There are no workspaces; keys belong to tenants."),
    ignored("Anthropic", "billing_policy", "Nothing is billed."),
    ignored("Anthropic", "fallback_credit_token", "Nothing is billed."),
    refused("Anthropic", "container", "Offer a tool that runs code."),
    refused("Anthropic", "mcp_servers", "Offer the servers' tools as tools.", []),
    refused("Anthropic", "compaction", "Send a shorter conversation."),
    refused("Anthropic", "context_management", "Send a shorter conversation.", {}),
    refused("Anthropic", "diagnostics", "GET /requests shows requests under way."),
    refused("Anthropic", "fallbacks", "Send the request again with another model.", []),
    refused("Anthropic", "inference_geo", "The answer is computed where this server runs."),
    refused("Anthropic", "speed", "All requests are served alike.", "standard"),
    refused("Anthropic", "thread", "Nothing is stored: send the whole conversation."),
    refused("Anthropic", "output_format", "Send output_config.format."),
)

GENERATE = (
    refused("text-generation-inference", "adapter_id", "Name the adapter in model."),
    refused("text-generation-inference", "best_of", "Send n to /v1/completions.", 1),
    refused("text-generation-inference", "typical_p", "Send top_p or min_p.", 1.0),
    refused("text-generation-inference", "watermark", "", False),
)

ROUTES = {
    "/v1/chat/completions": (*CHAT, *SAMPLED, *STORED),
    "/v1/completions": (*COMPLETION, *SAMPLED),
    "/v1/responses": (*RESPONSES, *STORED),
    "/v1/messages": MESSAGES,
    "/generate (parameters)": GENERATE,
}


def table() -> str:
    """The rows in Markdown, for docs/clients.md."""
    lines = ["| route | field | of | what happens |", "|---|---|---|---|"]
    for route, rows in ROUTES.items():
        for row in sorted(rows, key=lambda row: (row.treatment, row.project, row.name)):
            lines.append(f"| `{route}` | `{row.name}` | {row.project} | {row.sentence} |")
    return "\n".join(lines)
