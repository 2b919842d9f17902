"""Why a step failed: rules that read its frames, loaded when there is an error."""
