"""Several engines behind one address, with NVIDIA Dynamo in front (`outrider[cluster]`).

Dynamo's front end has the HTTP API and the tokenizer, routes by KV events, sends prompts to prefill workers, and lets
requests go on elsewhere when a worker dies. `worker` is our engine as one of its workers; `supervisor` starts and
watches a cluster on one machine.
"""
