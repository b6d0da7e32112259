// The fields of every schema of @ag-ui/core: {name: {field: {required, values}}}, where `values`
// is the closed set of strings that a field takes, if it is one.
import * as schemas from "@ag-ui/core/schemas";

function inner(schema) {
  let found = schema._zod.def;
  while (found.innerType) found = found.innerType._zod.def;
  return found;
}

function values(definition) {
  if (definition.type === "enum") return Object.values(definition.entries);
  return definition.type === "literal" ? definition.values : null;
}

const fields = ([name, schema]) => [
  name,
  { required: schema._zod.optin !== "optional", values: values(inner(schema)) },
];

const found = {};
for (const [name, schema] of Object.entries(schemas)) {
  if (!name.endsWith("Schema") || !schema._zod) continue;
  if (schema.shape) {
    found[name.slice(0, -6)] = Object.fromEntries(Object.entries(schema.shape).map(fields));
  }
}
console.log(JSON.stringify(found));
