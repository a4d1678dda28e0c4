"""The planner: what a model's layers are, and plans as texts. The search itself is C++ (src/plan)."""
