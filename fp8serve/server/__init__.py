"""HTTP, and the engine, the jobs and the parser processes behind it.

Packages: `schemas` (what clients send and get), `http` (socket to handler), `serving` (engine and its requests),
`parsing` (bodies and prompts), `finetuning` (jobs), `api` (routes). `server_state` holds one server's parts; `app`
joins the packages and `launch` runs the result.
"""
