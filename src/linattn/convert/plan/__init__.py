"""Plans: what each layer of a model is converted to."""

from linattn.convert.plan.layers import LayerPlan, LayerShape, Plan
from linattn.convert.plan.methods import METHODS, plan

__all__ = ["METHODS", "LayerPlan", "LayerShape", "Plan", "plan"]
