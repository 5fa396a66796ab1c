"""From a caller's buffers to one checked call: facts, spans, aliases, workspace, frames."""
