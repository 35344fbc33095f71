"""A door for agents: programs with a loop of their own, which ask the node's engines in OpenAI's protocol."""
