"""Agents: programs with a loop of their own, which query the node's engines by OpenAI's protocol."""
