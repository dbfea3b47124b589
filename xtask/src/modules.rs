//! The modules of a crate, the names that each defines, and the paths that each uses.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::TokenStream;
use syn::visit::{self, Visit};
use syn::{Ident, Item, ItemMod, UseTree, Visibility};

use crate::sources::{self, Sources};
use crate::tokens::{self, UsedPath};

/// What a path means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Module(usize),
    /// An item, or a part of it, of this module.
    ItemOf(usize),
}

/// A name that a `use` declaration makes, or several.
pub(crate) struct Import {
    pub(crate) path: UsedPath,
    /// The name; none for `*`.
    pub(crate) name: Option<String>,
    pub(crate) is_reexport: bool,
}

/// A module, with its own code only.
pub(crate) struct Module {
    /// Names from the crate's root.
    pub(crate) path: Vec<String>,
    /// Number of the source file.
    pub(crate) file: usize,
    pub(crate) imports: Vec<Import>,
    /// Paths outside of `use` declarations.
    pub(crate) paths: Vec<UsedPath>,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// Names of its items.
    names: BTreeSet<String>,
    /// Words in arguments of macros that are items, which may define them.
    macro_words: BTreeSet<String>,
}

/// The modules of a crate outside of test code; the first is the crate's root.
pub(crate) struct Crate {
    modules: Vec<Module>,
}

impl Crate {
    /// Returns the crates of the sources that are checked: libraries, and programs in `main.rs`.
    pub(crate) fn all(sources: &Sources) -> Vec<Self> {
        let is_root = |path: &str| {
            ["src/lib.rs", "src/main.rs"].iter().any(|root| {
                path.strip_suffix(root).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
            })
        };
        let roots = sources.checked().filter(|(source, _)| is_root(&source.path));
        roots.filter_map(|(source, _)| Self::new(sources, &source.path)).collect()
    }

    /// Returns the crate whose root is the file `root`.
    pub(crate) fn new(sources: &Sources, root: &str) -> Option<Self> {
        let file = sources.find(root)?;
        let syntax = sources.files()[file].syntax.as_ref()?;
        let mut modules = Modules { sources, modules: Vec::new() };
        modules.add(Vec::new(), None, Place { file, inline: Vec::new() }, &syntax.items);
        Some(Self { modules: modules.modules })
    }

    pub(crate) fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// Number of the source file of the crate's root.
    pub(crate) fn root_file(&self) -> usize {
        self.modules[0].file
    }

    /// Returns the names of the modules directly below the root that have files.
    pub(crate) fn top_modules(&self) -> BTreeSet<&str> {
        let children = self.modules[0].children.iter();
        let with_files =
            children.filter(|(_, module)| self.modules[**module].file != self.root_file());
        with_files.map(|(name, _)| name.as_str()).collect()
    }

    /// Finds what a path in a module means, through imports and re-exports; none if that is not of
    /// this crate.
    pub(crate) fn resolve(&self, module: usize, segments: &[String]) -> Option<Target> {
        // Words in macros are a guess.
        [false, true].into_iter().find_map(|guesses| {
            Search { modules: &self.modules, guesses, searching: BTreeSet::new() }
                .resolve(module, segments)
        })
    }

    /// Returns the module directly below the root that a path from `crate` or `super` names; for a
    /// name that the root re-exports, the one that defines it.
    pub(crate) fn named_top_module(&self, module: usize, segments: &[String]) -> Option<&str> {
        let mut base = match segments.first()?.as_str() {
            "crate" => 0,
            "super" | "self" => module,
            _ => return None,
        };
        for (at, segment) in segments.iter().enumerate() {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => base = self.modules[base].parent?,
                _ if base == 0 => {
                    let target = match self.modules[0].children.get(segment) {
                        Some(child) => Target::Module(*child),
                        None => self.resolve(0, &segments[at..])?,
                    };
                    let (Target::Module(found) | Target::ItemOf(found)) = target;
                    return self.modules[found].path.first().map(String::as_str);
                }
                _ => break,
            }
        }
        self.modules[base].path.first().map(String::as_str)
    }
}

/// Where the items of a module stand.
struct Place {
    file: usize,
    /// Modules within the file around them.
    inline: Vec<String>,
}

/// Collects the modules of a crate.
struct Modules<'a> {
    sources: &'a Sources,
    modules: Vec<Module>,
}

impl Modules<'_> {
    /// Adds a module with those below it, and returns its number.
    fn add(
        &mut self,
        path: Vec<String>,
        parent: Option<usize>,
        place: Place,
        items: &[Item],
    ) -> usize {
        let mut code = Code::default();
        for item in items {
            code.define(item);
            code.visit_item(item);
        }
        let number = self.modules.len();
        self.modules.push(Module {
            path: path.clone(),
            file: place.file,
            imports: code.imports,
            paths: code.paths,
            parent,
            children: BTreeMap::new(),
            names: code.names,
            macro_words: code.macro_words,
        });
        for item in items {
            let Item::Mod(child) = item else { continue };
            let name = child.ident.to_string();
            let mut path = path.clone();
            path.push(name.clone());
            let added = match &child.content {
                Some((_, items)) => {
                    let mut inline = place.inline.clone();
                    inline.push(name.clone());
                    let place = Place { file: place.file, inline };
                    Some(self.add(path, Some(number), place, items))
                }
                None => self.add_file(path, number, &place, child),
            };
            if let Some(added) = added {
                self.modules[number].children.insert(name, added);
            }
        }
        number
    }

    /// Adds a module that is in a file of its own.
    fn add_file(
        &mut self,
        path: Vec<String>,
        parent: usize,
        place: &Place,
        declaration: &ItemMod,
    ) -> Option<usize> {
        let sources = self.sources;
        let declaring = &sources.files()[place.file].path;
        let candidates = sources::candidates(declaring, &place.inline, declaration);
        let file = candidates.iter().find_map(|path| sources.find(path))?;
        let items = &sources.files()[file].syntax.as_ref()?.items;
        Some(self.add(path, Some(parent), Place { file, inline: Vec::new() }, items))
    }
}

/// Names and paths in the code of one module.
#[derive(Default)]
struct Code {
    names: BTreeSet<String>,
    macro_words: BTreeSet<String>,
    imports: Vec<Import>,
    paths: Vec<UsedPath>,
}

impl Code {
    /// Records the names that an item of the module defines.
    fn define(&mut self, item: &Item) {
        let name = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::TraitAlias(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Union(item) => &item.ident,
            Item::Macro(item) => match &item.ident {
                Some(name) => name,
                None => return self.macro_words.extend(tokens::words(item.mac.tokens.clone())),
            },
            Item::ForeignMod(block) => {
                for item in &block.items {
                    match item {
                        syn::ForeignItem::Fn(item) => self.define_name(&item.sig.ident),
                        syn::ForeignItem::Static(item) => self.define_name(&item.ident),
                        syn::ForeignItem::Type(item) => self.define_name(&item.ident),
                        _ => {}
                    }
                }
                return;
            }
            _ => return,
        };
        self.define_name(name);
    }

    fn define_name(&mut self, name: &Ident) {
        self.names.insert(name.to_string());
    }

    /// Records the imports of a `use` declaration whose path begins with `prefix`.
    fn import(&mut self, prefix: &[String], tree: &UseTree, is_reexport: bool) {
        let mut segments = prefix.to_vec();
        match tree {
            UseTree::Path(path) => {
                segments.push(path.ident.to_string());
                self.import(&segments, &path.tree, is_reexport);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(prefix, tree, is_reexport);
                }
            }
            UseTree::Name(one) => self.import_name(segments, &one.ident, &one.ident, is_reexport),
            UseTree::Rename(one) => {
                self.import_name(segments, &one.ident, &one.rename, is_reexport)
            }
            UseTree::Glob(glob) => {
                let line = glob.star_token.span.start().line;
                self.imports.push(Import {
                    path: UsedPath { segments, line },
                    name: None,
                    is_reexport,
                });
            }
        }
    }

    /// Records the import of `ident`, below the path of `segments`, with the name `name`.
    fn import_name(
        &mut self,
        mut segments: Vec<String>,
        ident: &Ident,
        name: &Ident,
        is_reexport: bool,
    ) {
        let mut name = name.to_string();
        if ident != "self" {
            segments.push(ident.to_string());
        } else if name == "self" {
            name = segments.last().cloned().unwrap_or_default();
        }
        let line = ident.span().start().line;
        self.imports.push(Import {
            path: UsedPath { segments, line },
            name: Some(name),
            is_reexport,
        });
    }
}

impl<'ast> Visit<'ast> for Code {
    // Modules within it are modules of their own.
    fn visit_item_mod(&mut self, _: &'ast ItemMod) {}

    // `pub(in crate::queue)` imports nothing.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            let is_reexport = !matches!(item.vis, Visibility::Inherited);
            self.import(&[], &item.tree, is_reexport);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none()
            && let Some(first) = path.segments.first()
        {
            self.paths.push(UsedPath {
                segments: path.segments.iter().map(|segment| segment.ident.to_string()).collect(),
                line: first.ident.span().start().line,
            });
        }
        visit::visit_path(self, path);
    }

    fn visit_token_stream(&mut self, tokens: &'ast TokenStream) {
        self.paths.extend(tokens::paths(tokens.clone()));
    }
}

/// The search for the meaning of a path.
struct Search<'a> {
    modules: &'a [Module],
    /// Take words in arguments of macros for names that these define.
    guesses: bool,
    /// Names that are being searched, with the modules: imports may form circles.
    searching: BTreeSet<(usize, String)>,
}

impl Search<'_> {
    fn resolve(&mut self, module: usize, segments: &[String]) -> Option<Target> {
        let mut target = Target::Module(module);
        for (at, segment) in segments.iter().enumerate() {
            let Target::Module(here) = target else { return Some(target) };
            target = match segment.as_str() {
                "crate" if at == 0 => Target::Module(0),
                "self" => target,
                "super" => Target::Module(self.modules[here].parent?),
                // The first may be a crate, or a type of the language.
                name => self.name(here, name, self.guesses && at > 0)?,
            };
        }
        Some(target)
    }

    /// Finds what a name means in a module, unless that is being searched already.
    fn name(&mut self, module: usize, name: &str, guesses: bool) -> Option<Target> {
        let searched = (module, name.to_owned());
        if !self.searching.insert(searched.clone()) {
            return None;
        }
        let found = self.name_in(module, name, guesses);
        self.searching.remove(&searched);
        found
    }

    fn name_in(&mut self, number: usize, name: &str, guesses: bool) -> Option<Target> {
        let module = &self.modules[number];
        if let Some(child) = module.children.get(name) {
            return Some(Target::Module(*child));
        }
        if module.names.contains(name) {
            return Some(Target::ItemOf(number));
        }
        for import in module.imports.iter().filter(|import| import.name.as_deref() == Some(name)) {
            let target = self.resolve(number, &import.path.segments);
            if target.is_some() {
                return target;
            }
        }
        for import in module.imports.iter().filter(|import| import.name.is_none()) {
            if let Some(Target::Module(other)) = self.resolve(number, &import.path.segments)
                && let Some(target) = self.name(other, name, guesses)
            {
                return Some(target);
            }
        }
        (guesses && module.macro_words.contains(name)).then_some(Target::ItemOf(number))
    }
}

#[cfg(test)]
#[path = "modules_tests.rs"]
mod tests;
