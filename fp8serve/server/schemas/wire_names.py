"""How the options of training are spelt in a fine-tune's body. Without pydantic: the command line reads it, too."""

WIRE_NAMES = {"lr": "learning_rate"}
NOT_ON_THE_WIRE = ("data", "out", "eval_data", "save_minutes", "format", "device", "template_date", "reward",
                   "report_to")  # fmt: skip
"""Options of training that are the operator's, or that the server fills in."""
