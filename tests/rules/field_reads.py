"""Which fields of which classes are read, found from annotations: enough inference to tell `optim.min` from `np.min`.

Understood: annotated arguments, variables and attributes; `self`; calls of classes, annotated functions and methods;
loops over, and items of, annotated sequences; `X | None`. What it cannot type counts as no read.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SEQUENCES = {"tuple", "list", "Sequence", "Iterable", "Iterator", "frozenset", "set"}
VALIDATORS = {"model_validator", "field_validator"}

Read = tuple[str, str]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Type:
    """A class by its name, or a sequence of such."""

    name: str
    many: bool = False


@dataclass(kw_only=True)
class Class:
    """What a class says of itself: the types of its attributes and of what its methods return."""

    bases: list[str]
    attributes: dict[str, Type] = field(default_factory=dict)
    returns: dict[str, Type] = field(default_factory=dict)
    properties: set[str] = field(default_factory=set)


class FieldReads:
    """Reads (class, field) in all the trees together."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, Type] = {}
        self.reads: set[Read] = set()
        bodies = list(trees)
        nodes = [node for tree in bodies for node in ast.walk(tree)]
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = Class(bases=[ast.unparse(base) for base in node.bases])
        for node in nodes:
            self._declare(node)
        # Twice: an attribute assigned in one class may be typed by an attribute of a class further down.
        for _ in range(2):
            for tree in bodies:
                _Walker(self, {}, None).walk(tree.body)

    def _declare(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            self._declare_members(self.classes[node.name], node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (result := self.annotated(node.returns)):
            self.functions[node.name] = result

    def _declare_members(self, owner: Class, node: ast.ClassDef) -> None:
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                if found := self.annotated(member.annotation):
                    owner.attributes[member.target.id] = found
            elif isinstance(member, ast.FunctionDef):
                if decorators(member) & {"property", "cached_property"}:
                    owner.properties.add(member.name)
                if found := self.annotated(member.returns):
                    owner.returns[member.name] = found

    def annotated(self, annotation: ast.expr | None) -> Type | None:
        """The type that an annotation names, None for one outside these classes."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.annotated(ast.parse(annotation.value, mode="eval").body)
        if isinstance(annotation, ast.Name | ast.Attribute):
            name = ast.unparse(annotation).rpartition(".")[2]
            return Type(name) if name in self.classes else None
        if isinstance(annotation, ast.BinOp):
            return self.annotated(annotation.left) or self.annotated(annotation.right)
        if isinstance(annotation, ast.Subscript):
            inner = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            found = self.annotated(inner)
            many = ast.unparse(annotation.value).rpartition(".")[2] in SEQUENCES
            return Type(found.name, many) if found else None
        return None

    def member(self, owner: str, name: str) -> Type | None:
        """The type of an attribute or property, looked for in the bases too."""
        found = self.classes.get(owner)
        if found is None:
            return None
        if name in found.properties:
            return found.returns.get(name)
        return found.attributes.get(name) or next(filter(None, (self.member(base, name) for base in found.bases)), None)


class _Walker(ast.NodeVisitor):
    """Goes through statements in order with what is known of each variable."""

    def __init__(self, facts: FieldReads, variables: Mapping[str, Type], owner: str | None) -> None:
        self._facts = facts
        self._variables = dict(variables)
        self._owner = owner

    def walk(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        _Walker(self._facts, self._variables, node.name).walk(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if decorators(node) & VALIDATORS:
            return
        self._enter(node, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter(node, [node.body])

    def _enter(self, node: FunctionNode, body: Sequence[ast.AST]) -> None:
        inner = _Walker(self._facts, self._variables, self._owner)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            inner._bind(ast.Name(argument.arg), self._facts.annotated(argument.annotation))
        if self._owner and arguments and arguments[0].arg == "self":
            inner._variables["self"] = Type(self._owner)
        inner.walk(body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._facts.annotated(node.annotation))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind_items(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self._bind_items(generator.target, generator.iter)
        self.generic_visit(node)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self._type(node.value)
        if isinstance(node.ctx, ast.Load) and owner and not owner.many:
            self._facts.reads.add((owner.name, node.attr))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for inner_target, inner_value in zip(target.elts, value.elts, strict=True):
                self._assign(inner_target, inner_value)
        else:
            self._bind(target, self._type(value))

    def _bind_items(self, target: ast.expr, iterated: ast.expr) -> None:
        if (
            isinstance(iterated, ast.Call)
            and ast.unparse(iterated.func) == "enumerate"
            and isinstance(target, ast.Tuple)
        ):
            target, iterated = target.elts[-1], iterated.args[0]
        found = self._type(iterated)
        self._bind(target, Type(found.name) if found and found.many else None)

    def _bind(self, target: ast.expr, found: Type | None) -> None:
        if isinstance(target, ast.Name):
            self._variables.pop(target.id, None)
            if found:
                self._variables[target.id] = found
        elif isinstance(target, ast.Attribute) and found and (owner := self._type(target.value)):
            self._facts.classes[owner.name].attributes.setdefault(target.attr, found)

    def _type(self, node: ast.expr) -> Type | None:
        if isinstance(node, ast.Name):
            return self._variables.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._type(node.value)
            return self._facts.member(owner.name, node.attr) if owner and not owner.many else None
        if isinstance(node, ast.Call):
            return self._type_of_call(node.func)
        if isinstance(node, ast.Subscript):
            found = self._type(node.value)
            return Type(found.name, isinstance(node.slice, ast.Slice)) if found and found.many else None
        if isinstance(node, ast.IfExp):
            return self._type(node.body) or self._type(node.orelse)
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self._type, node.values)), None)
        return self._type(node.value) if isinstance(node, ast.NamedExpr) else None

    def _type_of_call(self, function: ast.expr) -> Type | None:
        if isinstance(function, ast.Name):
            return Type(function.id) if function.id in self._facts.classes else self._facts.functions.get(function.id)
        if isinstance(function, ast.Attribute):
            owner = self._type(function.value)
            if owner and function.attr == "model_copy":
                return owner
            if owner and owner.name in self._facts.classes:
                return self._facts.classes[owner.name].returns.get(function.attr)
            return self._facts.functions.get(function.attr) if isinstance(function.value, ast.Name) else None
        return None


def decorators(node: ast.FunctionDef) -> set[str]:
    """Names of a function's decorators, without their arguments or modules."""
    calls = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return {ast.unparse(each).rpartition(".")[2] for each in calls}
