"""What a model wrote becomes an answer: reasoning, content and tool calls, as it comes or at the end."""
