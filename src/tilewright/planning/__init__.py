"""From a validated graph to one ranked list of plans, and to the plan that runs."""
