"""An HTTP server in OpenAI's protocol. It needs the extra [serve]; nothing else of the runtime imports it."""
