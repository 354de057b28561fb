"""Sample data -> amax histories -> scales. Installed as `fp8serve.calibration`."""
