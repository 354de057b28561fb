"""A worker for NVIDIA Dynamo: `python -m fp8serve.integrations.dynamo MODEL` (docs/dynamo.md).

Only `engine.py` and `options.py` import Dynamo, which the extra `dynamo` installs.
"""
