"""What each layer of a converted model becomes."""

from linattn.linearize.plan.layers import LayerPlan, LayerShape, Plan
from linattn.linearize.plan.methods import METHODS, plan

__all__ = ["METHODS", "LayerPlan", "LayerShape", "Plan", "plan"]
