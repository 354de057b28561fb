"""The HTTP server, which manages engine processes, fine-tune jobs and parser processes.

Packages: `schemas` (request bodies), `http` (connections and middleware), `access` (API keys and limits), `serving`
(models and their requests), `parsing` (bodies and prompts), `output_parsers` (tool calls and reasoning), `finetuning`
(jobs) and `api` (routes). `server_state` holds the parts of one server, `app` creates the application, and `launch`
runs it.
"""
