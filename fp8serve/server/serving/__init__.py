"""Which weights answer, the engine process behind them, and the requests that it runs."""
