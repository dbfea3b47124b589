//! Items by index; indices are reused.

pub(super) struct Slab<T>(Vec<Option<Box<T>>>);

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Slab<T> {
    pub(super) fn put(&mut self, item: T) -> usize {
        let index = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        if index == self.0.len() {
            self.0.push(None);
        }
        self.0[index] = Some(Box::new(item));
        index
    }

    pub(super) fn take(&mut self, index: usize) -> Option<Box<T>> {
        self.0.get_mut(index)?.take()
    }

    pub(super) fn get(&self, index: usize) -> Option<&T> {
        self.0.get(index)?.as_deref()
    }

    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.0.get_mut(index)?.as_deref_mut()
    }

    /// All indices are below this one.
    pub(super) fn end(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten().map(|item| &**item)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().flatten().map(|item| &mut **item)
    }

    /// Indices of the items that meet a condition.
    pub(super) fn find(&self, is_wanted: impl Fn(&T) -> bool) -> Vec<usize> {
        let found = |index: &usize| self.get(*index).is_some_and(&is_wanted);
        (0..self.end()).filter(found).collect()
    }
}
